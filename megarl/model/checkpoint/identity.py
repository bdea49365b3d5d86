# SPDX-License-Identifier: Apache-2.0
"""Identify the base model of a checkpoint: fields of config.json and samples of the weights.

Without this check another model of the same shape (an Instruct model instead of its base) would load without an error
and compute something else.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megarl.families import FAMILIES, family_of
from megarl.model.layers.attention.rope import rope_of
from megarl.model.weights.full_config import HARMLESS, HARMLESS_PREFIXES
from megarl.model.weights.hf_folder import WeightFolder, parse_json, read_config

ROPE = "rope_parameters"
# The number of tensors sampled, spread over the model. One row of each is read, so the cost does not grow with the
# model.
TENSORS = 64


def identify(folder: str | Path) -> dict[str, Any]:
    """Return the JSON-able record that ``difference`` compares.

    Args:
        folder: a Hugging Face folder.

    Raises:
        ModelError: the folder is incomplete.
        UnsupportedError: the model's RoPE is not supported.
    """
    weights = WeightFolder(folder)
    names = sorted(weights.file_of)
    chosen = names[:: -(-len(names) // TENSORS)]
    return {"config": _fields(folder), "weights": {name: _sample(weights, name) for name in chosen}}


def difference(saved: Mapping[str, Any], folder: str | Path) -> str | None:
    """Describe the first difference between the model in ``folder`` and the record ``saved``; None if there is none.

    A field that only one of the two has is not compared: transformers adds fields when it saves a model again.
    """
    config = _fields(folder)
    # Scalars first: a number names the cause better than the list of layers derived from it.
    for name, value in sorted(saved["config"].items(), key=lambda field: isinstance(field[1], list | dict)):
        if name in config and config[name] != value:
            return f"{name} in its config.json was {value!r}, and is {config[name]!r}"
    weights = WeightFolder(folder)
    for name, sample in saved["weights"].items():
        if name not in weights.file_of:
            return f"it had a tensor '{name}'"
        if _sample(weights, name) != sample:
            return f"'{name}' had other values"
    return None


def _fields(folder: str | Path) -> dict[str, Any]:
    raw = parse_json(Path(folder).expanduser() / "config.json")
    if raw.get("model_type") not in FAMILIES:  # only transformers computes it, and may read any field
        read = {name for name in raw if name not in HARMLESS and not name.startswith(HARMLESS_PREFIXES)}
        return {name: raw[name] for name in sorted(read - {"dtype"}) if raw[name] is not None}
    config = read_config(folder)
    rope = rope_of(config)  # normalised: config.json may write the same RoPE in several ways
    frequencies = None if rope.frequencies is None else _digest(rope.frequencies)
    fields = {name: config[name] for name in sorted(family_of(config).reads) if config.get(name) is not None}
    return fields | {ROPE: {"rope_theta": rope.base, "factor": rope.attention_factor, "frequencies": frequencies}}


def _sample(weights: WeightFolder, name: str) -> str:
    """Digest a matrix's middle row, or a whole vector."""
    source = weights.get_slice(name)
    rows = source.get_shape()[0] if len(source.get_shape()) > 1 else 0
    return _digest(source[rows // 2 : rows // 2 + 1] if rows else source[:])


def _digest(tensor: torch.Tensor) -> str:
    """Digest the values in float32, so that the stored dtype does not count."""
    return hashlib.sha256(tensor.float().contiguous().numpy().tobytes()).hexdigest()[:12]
