# SPDX-License-Identifier: Apache-2.0
"""Fill a model of a named shape with random weights, drawn on its device."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from megarl.bench.settings import model_config
from megarl.bench.shapes import SHAPES
from megarl.model.weights.base_tensors import load_base

# Memory-backed files.
TMPFS = "/dev/shm"


def fill_randomly(chunks: Sequence[torch.nn.Module], seed: int) -> None:
    """Draw matrices from a normal distribution of deviation 0.02; norms become 1 and biases 0."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=0.02)
                else:
                    parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def model_folder(model: str, scratch: Path) -> Path:
    """Return the model's folder; for a named shape a new one in ``scratch``, with a config.json only."""
    if model not in SHAPES:
        return Path(model)
    folder = scratch / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model_config(model)))
    return folder


def base_filler(model: str, seed: int) -> Callable[..., None]:
    """Return what fills the base of a model that is being built: random weights for a named shape, else its files."""

    def fill(chunks: Any, *_: Any) -> None:
        fill_randomly(chunks, seed)

    return fill if model in SHAPES else load_base


def save_model(model: str, scratch: Path, dtype: str, device: str, seed: int) -> Path:
    """Return the model's folder with weights; for a named shape a new one in ``scratch``, with random weights."""
    folder = model_folder(model, scratch)
    if model in SHAPES:
        torch.manual_seed(seed)
        with torch.device(device):
            config = transformers.AutoConfig.from_pretrained(folder)
            network = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        network.save_pretrained(folder)
    return folder
