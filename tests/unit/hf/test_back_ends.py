# SPDX-License-Identifier: Apache-2.0
"""Compare ``TransformersModel`` with ``MegatronModel``: weights, updates, checkpoints, exports, adapters on and off."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from megarl.build import build_model, build_with, peft_config_of
from megarl.config import parse_config
from megarl.errors import AdapterError, MegarlError
from megarl.parallel.device import pick_device
from megarl.parallel.groups import init_groups
from megarl.peft.spec import AdapterSpec
from megarl.verify.inputs.samples import make_samples
from megarl.verify.reference.surrogate_loss import SurrogateLoss
from tests.helpers.models import SHAPE, make_model
from tests.helpers.tiny_run import everything

BACK_ENDS = ("local", "transformers")
LORA = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "rank_pattern": {"q_proj": 3}}
SAMPLES = make_samples(6, SHAPE["vocab_size"], seed=1)
WEIGHTS = np.linspace(0.05, 0.1, len(SAMPLES))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "untied", "qwen3", tied=False)
    make_model(folder / "tied", "llama", tied=True)
    return folder


def build(folder: Path, backend: str, dtype: str = "float32", lora: Any = LORA, **train: Any) -> Any:
    section = {"path": str(folder), "dtype": dtype, "backend": backend}
    settings = {"device": "cpu", "micro_batch_tokens": 64, "weight_decay": 0.1, **train}
    return build_model(section, lora=lora, train=settings)


def update(model: Any, seed: int) -> float:
    samples = make_samples(6, SHAPE["vocab_size"], seed=seed)
    model.forward_backward(model.pack(samples, WEIGHTS), SurrogateLoss())
    return model.optim_step(5e-3)["grad_norm"]


def logprobs(model: Any, **how: Any) -> np.ndarray:
    return np.concatenate(model.forward(model.pack(SAMPLES), **how))


def exported(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.export_weights(adapter_only=True)}


@pytest.mark.parametrize("which", ["untied", "tied"])
def test_a_seed_gives_both_the_same_adapter_and_updates_and_exports_stay_alike(folder: Path, which: str) -> None:
    ours, theirs = (build(folder / which, backend) for backend in BACK_ENDS)
    first, second = exported(ours), exported(theirs)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert ours.export_adapter_config().items() >= {"r": 4, "lora_alpha": 6}.items()
    assert ours.export_adapter_config() == theirs.export_adapter_config()
    for seed in range(3):
        assert update(theirs, seed) == pytest.approx(update(ours, seed), rel=1e-4)
    first, second = exported(ours), exported(theirs)
    assert max(float((first[name] - second[name]).abs().max()) for name in first) < 5e-4
    assert np.abs(logprobs(ours) - logprobs(theirs)).max() < 1e-3
    bases = [dict(model.export_weights(adapter_only=False)) for model in (ours, theirs)]
    assert bases[0].keys() == bases[1].keys() and all(torch.equal(bases[0][n], bases[1][n]) for n in bases[0])
    for changed_only in (False, True):
        merged = [dict(model.export_merged(changed_only)) for model in (ours, theirs)]
        assert merged[0].keys() == merged[1].keys()
        assert max(float((merged[0][n] - merged[1][n]).abs().max()) for n in merged[0]) < 1e-3
    after = dict(theirs.export_weights(adapter_only=False))
    assert all(torch.equal(after[name], bases[0][name]) for name in after), "the base never changes"


def test_merged_weights_are_peft_s_and_untie_an_adapted_embedding(folder: Path, tmp_path: Path) -> None:
    model = build(folder / "tied", "transformers", lora={"r": 4, "target_modules": ["q_proj", "embed_tokens"]})
    for seed in range(2):
        update(model, seed)
    model.save_adapter(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(folder / "tied", dtype=torch.float32)
    output = base.lm_head.weight.detach().clone()  # PEFT adds the embedding's update to the tied one too
    truth = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()
    merged = {name: tensor.clone() for name, tensor in model.export_merged()}
    assert merged.keys() == truth.keys() and torch.equal(merged.pop("lm_head.weight"), output)
    assert max(float((merged[name] - truth[name]).abs().max()) for name in merged) < 1e-6
    assert not torch.equal(merged["model.embed_tokens.weight"], output)


@pytest.mark.parametrize("saved_by", BACK_ENDS)
def test_a_checkpoint_of_one_back_end_goes_on_in_the_other(folder: Path, tmp_path: Path, saved_by: str) -> None:
    [other] = set(BACK_ENDS) - {saved_by}
    whole = build(folder / "untied", saved_by)
    for seed in range(2):
        update(whole, seed)
    whole.save_checkpoint(tmp_path / "checkpoint", {"cursor": 7})
    whole.finish_checkpoint()
    update(whole, 2)
    resumed = build(folder / "untied", other)
    assert resumed.load_checkpoint(tmp_path / "checkpoint") == {"cursor": 7} and resumed.version == 2
    update(resumed, 2)
    first, second = exported(whole), exported(resumed)
    assert max(float((first[name] - second[name]).abs().max()) for name in first) < 2e-4


def test_resume_is_bitwise_with_dropout_in_bfloat16(folder: Path, tmp_path: Path) -> None:
    lora = LORA | {"lora_dropout": 0.2}
    whole = build(folder / "untied", "transformers", "bfloat16", lora)
    update(whole, 0)
    without = logprobs(whole)
    assert np.array_equal(without, logprobs(whole)), "no dropout without gradient"
    whole.save_checkpoint(tmp_path / "checkpoint")
    update(whole, 1)
    expected = everything(whole)
    resumed = build(folder / "untied", "transformers", "bfloat16", lora, seed=3)
    resumed.load_checkpoint(tmp_path / "checkpoint")
    assert np.array_equal(without, logprobs(resumed))
    update(resumed, 1)
    found = everything(resumed)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    assert not torch.equal(next(iter(exported(whole).values())), torch.zeros(()))


def test_recomputed_layers_give_the_same_update(folder: Path) -> None:
    plain, full = (build(folder / "untied", "transformers", recompute=value) for value in ("none", "full"))
    for model in (plain, full):
        for seed in range(2):
            update(model, seed)
    assert full.peft_model.get_base_model().is_gradient_checkpointing
    first, second = exported(plain), exported(full)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_frozen_adapter_computes_by_name_and_is_never_trained(folder: Path, tmp_path: Path) -> None:
    start = build(folder / "untied", "transformers")
    update(start, 0)
    start.save_adapter(tmp_path / "adapter")
    tree = {
        "model": {"path": str(folder / "untied"), "dtype": "float32", "backend": "transformers"},
        "task": {"name": "arithmetic"},
        "train": {"micro_batch_tokens": 64, "prompts_per_step": 4},
        "lora": {"init_from": str(tmp_path / "adapter")},
        "sampler": {"max_prompt_tokens": 24, "max_response_tokens": 24},
    }
    config = parse_config(tree).trainer
    groups = init_groups(config.parallel, pick_device("cpu"))
    peft_config = peft_config_of(config)
    model = build_with(config, groups, [AdapterSpec(peft_config), AdapterSpec(peft_config, "reference", False)])
    for adapter in model.adapters.values():
        adapter.read(tmp_path / "adapter")
    model.optimizer.start_anew()
    assert np.array_equal(logprobs(model), logprobs(model, adapter="reference"))
    before = logprobs(model, adapter="reference")
    update(model, 1)
    assert np.array_equal(before, logprobs(model, adapter="reference")) and not np.array_equal(before, logprobs(model))
    assert not np.array_equal(before, logprobs(model, adapter=False))
    model.set_active("reference")
    assert np.array_equal(before, logprobs(model))
    with pytest.raises(MegarlError, match="adapter 'reference' is frozen"):
        update(model, 1)


def test_an_adapter_of_another_rank_or_with_a_lost_tensor_changes_nothing(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model, other = (build(folder / "untied", "transformers", lora=LORA | {"r": r}) for r in (4, 5))
    other.save_adapter(tmp_path / "other")
    before = exported(model)
    with pytest.raises(AdapterError, match=r"has \(rank, scaling\) \(5, 1.2\) in the file and \(4, 1.5\) here"):
        model.load_adapter(tmp_path / "other")
    model.save_adapter(tmp_path / "own")
    file = tmp_path / "own/adapter_model.safetensors"
    tensors = load_file(file)
    name, tensor = tensors.popitem()
    save_file(tensors, file)
    with pytest.raises(AdapterError, match=f"lacks '{name}'"):
        model.load_adapter(tmp_path / "own")
    save_file(tensors | {name: tensor, "more": tensor.clone()}, file)
    with pytest.raises(AdapterError, match="holds 'more', which nothing here uses"):
        model.load_adapter(tmp_path / "own")
    save_file(tensors | {name: tensor.T.contiguous()}, file)
    with pytest.raises(AdapterError, match="has shape"):
        model.load_adapter(tmp_path / "own")
    after = exported(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_training_switches_dropout_of_adapters_and_recomputation_alone(folder: Path) -> None:
    model = build(folder / "untied", "transformers", lora=LORA | {"lora_dropout": 0.5}, recompute="full")
    update(model, 0)
    calls: list[bool] = []
    mlp = model.network.body.layers[0].mlp
    mlp.register_forward_pre_hook(lambda module, _: calls.append(module.training))
    batch = model.pack(SAMPLES, WEIGHTS)
    evaluated = model.evaluate(batch, SurrogateLoss())["entropy"]
    computed = len(calls)
    assert model.forward_backward(batch, SurrogateLoss())["entropy"] != pytest.approx(evaluated, rel=1e-6)
    assert calls == [False] * 3 * computed, "computed once more, and anew in the backward pass"
