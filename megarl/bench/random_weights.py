# SPDX-License-Identifier: Apache-2.0
"""Fill a model of a named shape with random weights, drawn on its device."""

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from megarl.bench.settings import model_config
from megarl.bench.shapes import SHAPES
from megarl.model.weights.base_tensors import load_base, tensors_to_fill
from megarl.model.weights.full_config import names_of
from megarl.model.weights.sharded_tensor import ShardedTensor
from megarl.parallel.groups import Groups

DEVIATION = 0.02
# Memory-backed files.
TMPFS = "/dev/shm"


class _Drawn:
    """A tensor of random values; the interface is ``sharded_tensor.Sliceable``."""

    def __init__(self, tensor: ShardedTensor, seed: int, device: torch.device) -> None:
        self._tensor, self._device = tensor, device
        self._seed = seed * 2**32 + zlib.crc32(tensor.name.encode())

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        whole = torch.empty(self._tensor.shape, dtype=self._tensor.dtype, device=self._device)
        if whole.ndim == 1:
            return whole.fill_(0.0 if self._tensor.name.endswith("bias") else 1.0)[index]
        return whole.normal_(std=DEVIATION, generator=torch.Generator(self._device).manual_seed(self._seed))[index]


def fill_randomly(chunks: Sequence[Any], hf_config: Mapping[str, Any], groups: Groups, seed: int) -> None:
    """Draw matrices from a normal distribution of deviation 0.02; norms become 1 and biases 0.

    A tensor's values follow from the seed and its name, so the model is the same at every layout.

    Args:
        chunks: this rank's chunks.
        hf_config: parsed config.json.
        groups: this rank's process groups.
        seed: any number.
    """
    names = names_of(hf_config)
    for chunk in chunks:
        for tensor in tensors_to_fill(chunk, names, groups):
            tensor.load(_Drawn(tensor, seed, groups.device), groups)


def model_folder(model: str, scratch: Path, layers: int | None = None) -> Path:
    """Return the model's folder; for a named shape a new one in ``scratch``, with a config.json only.

    Args:
        model: a named shape or a folder.
        scratch: folder for the new one.
        layers: see ``model_config``.
    """
    if model not in SHAPES:
        return Path(model)
    folder = scratch / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model_config(model, layers)))
    return folder


def base_filler(model: str, seed: int) -> Callable[..., None]:
    """Return what fills the base of a model that is being built: random weights for a named shape, else its files."""

    def fill(chunks: Any, path: Any, hf_config: Mapping[str, Any], groups: Groups) -> None:
        fill_randomly(chunks, hf_config, groups, seed)

    return fill if model in SHAPES else load_base


def save_model(model: str, scratch: Path, dtype: str, device: str, seed: int, layers: int | None = None) -> Path:
    """Return the model's folder with weights; for a named shape a new one in ``scratch``, with random weights."""
    folder = model_folder(model, scratch, layers)
    if model in SHAPES:
        save_weights(folder, dtype, device, seed)
    return folder


def save_weights(folder: Path, dtype: str, device: str, seed: int) -> None:
    """Write random weights beside a config.json."""
    torch.manual_seed(seed)
    with torch.device(device):
        config = transformers.AutoConfig.from_pretrained(folder)
        network = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    network.save_pretrained(folder)
