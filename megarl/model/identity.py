# SPDX-License-Identifier: Apache-2.0
"""Which base model a checkpoint was trained on: what config.json says of it, and samples of its weights.

Another model of the same shape (an Instruct model for its base) would load without a word and compute something else.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megarl.families import family_of
from megarl.model.layers.rope import rope_of
from megarl.model.weights.hf_folder import WeightFolder, read_config

ROPE = "rope_parameters"
# So many tensors, spread over the model, and one row of each: a few reads, however large the model is.
TENSORS = 64


def identify(folder: str | Path) -> dict[str, Any]:
    """What ``difference`` compares, JSON-able.

    Args:
        folder: a Hugging Face folder.

    Raises:
        ModelError: it is incomplete.
        UnsupportedError: its RoPE is not supported.
    """
    weights = WeightFolder(folder)
    names = sorted(weights.where)
    chosen = names[:: -(-len(names) // TENSORS)]
    return {"config": _fields(read_config(folder)), "weights": {name: _sample(weights, name) for name in chosen}}


def difference(saved: Mapping[str, Any], folder: str | Path) -> str | None:
    """What first distinguishes a model from the one that ``identify`` saw; None if nothing does.

    Fields that only one config.json has are left out: transformers adds some when it writes a model again.
    """
    config = _fields(read_config(folder))
    # A number says more than the list of layers that follows from it.
    for name, value in sorted(saved["config"].items(), key=lambda field: isinstance(field[1], list | dict)):
        if name in config and config[name] != value:
            return f"{name} in its config.json was {value!r}, and is {config[name]!r}"
    weights = WeightFolder(folder)
    for name, sample in saved["weights"].items():
        if name not in weights.where:
            return f"it had a tensor '{name}'"
        if _sample(weights, name) != sample:
            return f"'{name}' had other values"
    return None


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = rope_of(config)  # alike for all the ways in which config.json may write it
    frequencies = None if rope.frequencies is None else _digest(rope.frequencies)
    fields = {name: config[name] for name in sorted(family_of(config).reads) if config.get(name) is not None}
    return fields | {ROPE: {"rope_theta": rope.base, "factor": rope.attention_factor, "frequencies": frequencies}}


def _sample(weights: WeightFolder, name: str) -> str:
    """A digest of a tensor's middle row, or of the whole of a vector."""
    source = weights.get_slice(name)
    rows = source.get_shape()[0] if len(source.get_shape()) > 1 else 0
    return _digest(source[rows // 2 : rows // 2 + 1] if rows else source[:])


def _digest(tensor: torch.Tensor) -> str:
    """Of the values, whatever dtype holds them."""
    return hashlib.sha256(tensor.float().contiguous().numpy().tobytes()).hexdigest()[:12]
