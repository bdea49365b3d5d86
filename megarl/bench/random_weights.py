# SPDX-License-Identifier: Apache-2.0
"""Fill a model of a named shape with random weights, drawn on its device."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import save_file

from megarl.bench.settings import model_config
from megarl.bench.shapes import SHAPES
from megarl.checkpoint_engine.folder_source import WEIGHTS
from megarl.model.weights.base_tensors import load_base


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


def save_adapter(folder: Path, out: Path, rank: int, dtype: str, seed: int) -> None:
    """Save a PEFT directory for a model's folder: random matrices for all linears."""
    with torch.device("meta"):
        network = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
        lora = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
        shapes = peft.get_peft_model_state_dict(peft.get_peft_model(network, lora))
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(one.shape, generator=generator) * 0.02 for name, one in shapes.items()}
    lora.save_pretrained(out)
    save_file({name: one.to(getattr(torch, dtype)) for name, one in tensors.items()}, out / WEIGHTS)
