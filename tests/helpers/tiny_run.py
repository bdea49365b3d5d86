# SPDX-License-Identifier: Apache-2.0
"""Build a tiny model with an adapter on this rank, and make updates that depend only on their number."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig

from megarl.config import parse_config
from megarl.lora import attach
from megarl.model.checkpoint.training_state import _rng_state
from megarl.model.megatron_model import MegatronModel
from megarl.parallel.device import pick_device
from megarl.parallel.groups import init_groups
from megarl.verify.inputs.samples import make_samples
from megarl.verify.reference.surrogate_loss import SurrogateLoss
from tests.helpers.models import SHAPE


def build(
    folder: Path, layout: dict[str, Any], dtype: str = "float32", model: str = "model", **lora: Any
) -> MegatronModel:
    """Build the model ``folder / model`` with a new adapter; in bf16 with dropout, so that the random states matter.

    Args:
        layout: the ``parallel`` section, and under ``train`` the changes of that section.
        lora: changes of the adapter's config.
    """
    train = {"micro_batch_tokens": 64, "prompts_per_step": 4} | layout.get("train", {})
    config = parse_config(
        {
            "model": {"path": str(folder / model), "dtype": dtype},
            "task": {"name": "arithmetic"},
            "parallel": {key: value for key, value in layout.items() if key != "train"},
            "train": train,
            "sampler": {"max_prompt_tokens": 24, "max_response_tokens": 24},
        }
    )
    dropout = 0.1 if dtype == "bfloat16" else 0.0
    settings = {"r": 4, "lora_alpha": 8, "lora_dropout": dropout, "target_modules": "all-linear"} | lora
    groups = init_groups(config.parallel, pick_device("auto"), seed=5)
    return MegatronModel(config.trainer, groups, attach(LoraConfig(**settings), seed=7))


def train(model: MegatronModel, seeds: range) -> None:
    """Make one update per seed, on that seed's samples."""
    for seed in seeds:
        samples = make_samples(8, SHAPE["vocab_size"], seed=seed)
        model.forward_backward(model.pack(samples, np.full(8, 0.05)), SurrogateLoss())
        model.optim_step(5e-4)


def everything(model: MegatronModel) -> dict[str, torch.Tensor]:
    """Return adapter, main weights, moments and random states of this rank."""
    state = {f"adapter {n}": p.data.clone() for n, p in model.adapter.parameters()}
    state |= {f"main {n}": t.clone() for n, t in model.optimizer.main_weights().items()}
    for kind, tensors in model.optimizer.moments().items():
        state |= {f"{kind} {n}": t.clone() for n, t in tensors.items()}
    return state | {f"rng {n}": t for n, t in _rng_state().items()} | {"steps": torch.tensor(model.optimizer.steps())}
