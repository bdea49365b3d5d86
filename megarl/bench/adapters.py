# SPDX-License-Identifier: Apache-2.0
"""Describe, change and save the adapter that the benchmarks use: all linears, random values."""

from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import save_file

from megarl.checkpoint_engine.folder_source import WEIGHTS
from megarl.model.trained_model import TrainedModel


def lora_section(rank: int, dropout: float = 0.0) -> dict[str, Any]:
    """Return the ``lora`` section."""
    return {"r": rank, "lora_alpha": 2 * rank, "lora_dropout": dropout, "target_modules": "all-linear"}


def peft_config(rank: int, dropout: float = 0.0) -> peft.LoraConfig:
    """Return the same as a config of PEFT."""
    return peft.LoraConfig(**lora_section(rank, dropout), task_type="CAUSAL_LM")


def change_adapter(model: TrainedModel, seed: int, std: float = 0.01) -> None:
    """Give the active adapter other values, as an optimizer step does."""
    with torch.no_grad():
        for number, (_, parameter) in enumerate(model.adapter.parameters()):
            generator = torch.Generator(parameter.device).manual_seed(seed * 100_003 + number)
            parameter.normal_(std=std, generator=generator)


def save_adapter(folder: Path, out: Path, rank: int, dtype: str, seed: int) -> None:
    """Save a PEFT directory for a model's folder."""
    with torch.device("meta"):
        network = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
        lora = peft_config(rank)
        shapes = peft.get_peft_model_state_dict(peft.get_peft_model(network, lora))
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(one.shape, generator=generator) * 0.02 for name, one in shapes.items()}
    lora.save_pretrained(out)
    save_file({name: one.to(getattr(torch, dtype)) for name, one in tensors.items()}, out / WEIGHTS)
