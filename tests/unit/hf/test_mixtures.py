# SPDX-License-Identifier: Apache-2.0
"""Train mixtures of experts, whose adapters PEFT puts on parameters: read what was saved, route as when sampling."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megarl.build import build_model, build_with, peft_config_of
from megarl.config import parse_config
from megarl.parallel.device import pick_device
from megarl.parallel.groups import destroy_groups, init_groups
from megarl.parallel.rendezvous import ALONE
from megarl.peft.spec import AdapterSpec
from megarl.verify.inputs.samples import make_samples
from megarl.verify.reference.hf_peft import all_logprobs
from megarl.verify.reference.surrogate_loss import SurrogateLoss
from tests.helpers.architectures import SIZES, write_model
from tests.unit.hf.test_architectures import check, save_adapter

EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2}
MIXTURES = {"qwen3_moe": {"moe_intermediate_size": 32, "head_dim": 8}, "mixtral": {}, "olmoe": {}}
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"target_modules": "all-linear"},
    "patterns": {"target_modules": "all-linear", "rank_pattern": {"q_proj": 3}, "alpha_pattern": {"k_proj": 5}},
    "parameters": {
        "target_modules": ["q_proj"],
        "target_parameters": PARAMETERS,
        "rank_pattern": {"gate_up_proj": 6, "0.mlp.experts.down_proj": 2, "q_proj": 3},
        "alpha_pattern": {"down_proj": 5},
    },
    "order": {
        "target_modules": ["q_proj"],
        "target_parameters": PARAMETERS,
        "rank_pattern": {"gate_up_proj": 6, ".*_proj": 3},
    },
}
SAMPLES = make_samples(6, SIZES["vocab_size"], seed=1)


def write_mixture(folder: Path, model_type: str, **settings: Any) -> Path:
    return write_model(folder, model_type, **EXPERTS, **MIXTURES.get(model_type, {}), **settings)


def build(folder: Path, **lora: Any) -> Any:
    return build_model(
        {"path": str(folder), "dtype": "float32", "backend": "transformers"},
        lora={"r": 4, "lora_alpha": 6} | lora,
        train={"device": "cpu", "micro_batch_tokens": 64},
    )


def update(model: Any) -> None:
    model.forward_backward(model.pack(SAMPLES, np.full(len(SAMPLES), 0.05)), SurrogateLoss())
    model.optim_step(2e-2)


def logprobs(model: Any) -> list[np.ndarray]:
    return model.forward(model.pack(SAMPLES))


@pytest.mark.parametrize("lora", ADAPTERS)
@pytest.mark.parametrize("model_type", MIXTURES)
def test_a_mixture_reads_its_own_checkpoint_and_starts_from_its_adapter(
    tmp_path: Path, model_type: str, lora: str
) -> None:
    folder = write_mixture(tmp_path / "model", model_type)
    model = build(folder, **ADAPTERS[lora])
    update(model)
    model.save_checkpoint(tmp_path / "checkpoint")
    model.finish_checkpoint()
    model.save_adapter(tmp_path / "adapter")
    expected = logprobs(model)
    destroy_groups()
    resumed = build(folder, **ADAPTERS[lora])
    assert not np.array_equal(np.concatenate(expected), np.concatenate(logprobs(resumed)))
    resumed.load_checkpoint(tmp_path / "checkpoint")
    assert np.array_equal(np.concatenate(expected), np.concatenate(logprobs(resumed)))
    destroy_groups()
    started = build(folder, init_from=str(tmp_path / "adapter"))
    assert np.array_equal(np.concatenate(expected), np.concatenate(logprobs(started)))
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    truth = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    for ours, theirs in zip(expected, all_logprobs(truth, SAMPLES, 1.0), strict=True):
        assert np.abs(ours - theirs).max() < 5e-5


def test_a_mixture_has_a_reference_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in ALONE.items():
        monkeypatch.setenv(key, value)
    folder = write_mixture(tmp_path / "model", "olmoe")
    adapter = save_adapter(folder, tmp_path / "adapter")
    tree = {
        "model": {"path": str(folder), "dtype": "float32", "backend": "transformers"},
        "task": {"name": "arithmetic"},
        "train": {"micro_batch_tokens": 64, "prompts_per_step": 4},
        "lora": {"init_from": str(adapter)},
        "sampler": {"max_prompt_tokens": 24, "max_response_tokens": 24},
    }
    config = parse_config(tree).trainer
    peft_config = peft_config_of(config)
    specs = [AdapterSpec(peft_config), AdapterSpec(peft_config, "reference", False)]
    model: Any = build_with(config, init_groups(config.parallel, pick_device("cpu")), specs)
    for one in model.adapters.values():
        one.read(adapter)
    model.optimizer.start_anew()
    batch = model.pack(SAMPLES)
    before = np.concatenate(model.forward(batch, adapter="reference"))
    assert np.array_equal(before, np.concatenate(model.forward(batch)))
    update(model)
    assert np.array_equal(before, np.concatenate(model.forward(batch, adapter="reference")))
    assert not np.array_equal(before, np.concatenate(model.forward(batch)))


def test_a_base_with_two_adapted_parameters_in_a_module_is_sent_as_its_files_hold_it(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "gpt_oss")
    model = build(folder, target_modules=["q_proj"], target_parameters=PARAMETERS)
    stored = load_file(folder / "model.safetensors")
    sent = dict(model.export_weights(adapter_only=False))
    assert sent.keys() == stored.keys() and "model.layers.0.mlp.experts.gate_up_proj" in sent
    assert all(torch.equal(sent[name], stored[name]) for name in sent)


@pytest.mark.parametrize("train", [{}, {"recompute": "full"}], ids=str)
@pytest.mark.parametrize(
    ("model_type", "settings", "targets"),
    [("mixtral", {"router_jitter_noise": 0.5}, "all-linear"), ("phimoe", {}, ["q_proj", "v_proj"])],
)
def test_updates_are_those_of_the_routing_that_sampled(
    tmp_path: Path, model_type: str, settings: dict[str, Any], targets: Any, train: dict[str, Any]
) -> None:
    """In training mode the first multiplies its inputs by noise, and the second draws its experts."""
    folder = write_mixture(tmp_path / "model", model_type, **settings)
    check(folder, save_adapter(folder, tmp_path / "adapter", target_modules=targets), train)
