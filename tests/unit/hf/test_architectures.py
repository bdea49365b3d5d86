# SPDX-License-Identifier: Apache-2.0
"""Compare logprobs, gradients and updated adapters with plain transformers + PEFT, sequence by sequence."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from megarl.build import build_model
from megarl.config import parse_config
from megarl.verify.inputs.samples import make_samples
from megarl.verify.reference.hf_peft import all_logprobs, each_update
from megarl.verify.reference.surrogate_loss import SurrogateLoss
from tests.helpers.architectures import ARCHITECTURES, SIZES, write_model

TRAIN = {"device": "cpu", "micro_batch_tokens": 64, "weight_decay": 0.1, "max_grad_norm": 0.5, "learning_rate": 1e-2}
UPDATES = 2


def save_adapter(model: Path, folder: Path, **settings: Any) -> Path:
    """Write an adapter whose every matrix is random."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    peft = get_peft_model(base, LoraConfig(**({"r": 4, "lora_alpha": 6, "target_modules": "all-linear"} | settings)))
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.1)
    peft.save_pretrained(folder)
    return folder


def largest(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-9))


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_logprobs_gradients_and_updates_are_those_of_peft(model_type: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", model_type)
    adapter = save_adapter(folder, tmp_path / "adapter")
    check(folder, adapter, {})


def check(folder: Path, adapter: Path, train: dict[str, Any]) -> None:
    """Compare two updates."""
    model = build_model(
        {"path": str(folder), "dtype": "float32", "backend": "transformers"},
        lora={"init_from": str(adapter)},
        train=TRAIN | train,
        temperature=0.7,
    )
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    truth = PeftModel.from_pretrained(base, adapter, is_trainable=True).eval()
    samples = make_samples(6, SIZES["vocab_size"], seed=1)
    weights = np.linspace(0.05, 0.1, len(samples))
    tree = {"model": {"path": str(folder)}, "task": {"name": "arithmetic"}, "sampler": {"temperature": 0.7}}
    config = parse_config(tree | {"train": {k: v for k, v in TRAIN.items() if k != "micro_batch_tokens"}})
    batch = model.pack(samples, weights)
    assert sum(len(bins) for bins in batch.plan) > 1 and max(len(one) for bins in batch.plan for one in bins) > 1
    with truth.disable_adapter():
        for ours, theirs in zip(model.forward(batch, adapter=False), all_logprobs(truth, samples, 0.7), strict=True):
            assert np.abs(ours - theirs).max() < 2e-5
    for update in each_update(truth, samples, [weights] * UPDATES, config):
        for ours, theirs in zip(model.forward(batch), update.logprobs, strict=True):
            assert np.abs(ours - theirs).max() < 5e-5
        metrics = model.forward_backward(batch, SurrogateLoss())
        assert metrics["entropy"] == pytest.approx(update.entropy, rel=1e-4)
        gradients = {name.replace(".default", ""): gradient for name, gradient in update.gradients.items()}
        found = model.gradients()
        assert found.keys() == gradients.keys()
        assert max(largest(found[name], gradients[name]) for name in found) < 2e-4
        assert model.optim_step(TRAIN["learning_rate"])["grad_norm"] == pytest.approx(update.norm, rel=1e-4)
    adapted = dict(truth.named_parameters())
    for name, tensor in model.export_weights(adapter_only=True):
        key = name.replace(".weight", ".default.weight") if "embedding" not in name else f"{name}.default"
        assert (tensor - adapted[key]).abs().max() < 5e-4, name
    assert model.version == UPDATES
