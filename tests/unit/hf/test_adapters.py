# SPDX-License-Identifier: Apache-2.0
"""Hold several adapters apart by name, and refuse adapter files that are damaged or belong to another model."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from megarl.build import build_model, build_with
from megarl.config import parse_config
from megarl.errors import AdapterError
from megarl.parallel.device import pick_device
from megarl.parallel.groups import init_groups
from megarl.parallel.rendezvous import ALONE
from megarl.peft.spec import AdapterSpec
from megarl.verify.inputs.adapters import make_adapter
from tests.helpers.models import make_model
from tests.unit.hf.test_back_ends import exported, logprobs, update

BACK_ENDS = ("local", "transformers")
FILE = "adapter_model.safetensors"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in ALONE.items():
        monkeypatch.setenv(key, value)


def build_named(folder: Path, backend: str, names: list[str], targets: list[str]) -> Any:
    tree = {
        "model": {"path": str(folder), "dtype": "float32", "backend": backend},
        "task": {"name": "arithmetic"},
        "train": {"micro_batch_tokens": 64, "prompts_per_step": 4},
        "sampler": {"max_prompt_tokens": 24, "max_response_tokens": 24},
    }
    config = parse_config(tree).trainer
    peft_config = LoraConfig(r=4, lora_alpha=6, target_modules=targets)
    specs = [AdapterSpec(peft_config, name) for name in names]
    return build_with(config, init_groups(config.parallel, pick_device("cpu")), specs)


@pytest.mark.parametrize("names", [["a", "ab"], ["layers", "lora_A"], ["weight", "q_proj"]], ids="-".join)
def test_an_adapter_holds_its_own_matrices_whatever_its_name(tmp_path: Path, names: list[str]) -> None:
    folder = make_model(tmp_path / "model", "llama", tied=True)
    model = build_named(folder, "transformers", names, ["q_proj", "embed_tokens"])
    first, second = (dict(model.adapters[name].parameters()) for name in names)
    assert first.keys() == second.keys() and len(first) == 2 * (4 + 1)
    assert all(first[name] is not second[name] for name in first)
    model.save_adapter(tmp_path / "adapter")
    stored = load_file(tmp_path / "adapter" / FILE)
    assert stored.keys() == first.keys()
    assert all(torch.equal(tensor, first[name]) for name, tensor in stored.items())


@pytest.mark.parametrize("backend", BACK_ENDS)
@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.b"], "adapter name 'a.b' cannot be used"),
        (["a", "values"], "adapter name 'values' cannot be used"),
        (["a", "a"], "the model already has an adapter named 'a'"),
    ],
)
def test_a_name_that_is_taken_or_invalid_is_refused(
    tmp_path: Path, backend: str, names: list[str], message: str
) -> None:
    folder = make_model(tmp_path / "model", "llama", tied=True)
    with pytest.raises(AdapterError, match=message):
        build_named(folder, backend, names, ["q_proj"])


@pytest.mark.parametrize("tied", [False, True])
def test_an_adapter_with_base_weights_of_another_model_is_refused(tmp_path: Path, tied: bool) -> None:
    folder = make_model(tmp_path / "model", "llama", tied=tied)
    adapter = make_adapter(folder, tmp_path / "adapter", target_modules=["embed_tokens", "lm_head", "q_proj"])
    tensors = load_file(adapter / FILE)
    model = build(folder, "transformers", adapter)
    before = exported(model)
    assert before.keys() < tensors.keys() and all(torch.equal(tensors[name], before[name]) for name in before)
    shutil.copytree(adapter, tmp_path / "other")
    for module in ("lm_head", "model.embed_tokens"):
        name = f"base_model.model.{module}.base_layer.weight"
        changed = tensors[name].clone()
        changed[100, 3] += 1
        save_file(tensors | {name: changed}, tmp_path / "other" / FILE)
        with pytest.raises(AdapterError, match=f"'{name}' differs from the model's own weight; .* another model"):
            model.load_adapter(tmp_path / "other")
    name = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"
    save_file(tensors | {name: torch.zeros(3)}, tmp_path / "other" / FILE)
    with pytest.raises(AdapterError, match=f"holds '{name}', which nothing here uses"):
        model.load_adapter(tmp_path / "other")


@pytest.mark.parametrize("backend", BACK_ENDS)
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_an_adapter_with_a_number_that_is_not_finite_changes_nothing(
    tmp_path: Path, backend: str, value: float
) -> None:
    folder = make_model(tmp_path / "model", "llama", tied=True)
    adapter = make_adapter(folder, tmp_path / "adapter")
    model = build(folder, backend, adapter)
    update(model, 0)
    before, computed = exported(model), logprobs(model)
    tensors = load_file(adapter / FILE)
    name = max(tensors)
    tensors[name][1, 2] = value
    save_file(tensors, adapter / FILE)
    with pytest.raises(AdapterError, match=f"{adapter / FILE}: '{name}' holds a number that is not finite"):
        model.load_adapter(adapter)
    after = exported(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (logprobs(model) == computed).all()


def build(folder: Path, backend: str, adapter: Path) -> Any:
    section = {"path": str(folder), "dtype": "float32", "backend": backend}
    train = {"device": "cpu", "micro_batch_tokens": 64}
    return build_model(section, lora={"init_from": str(adapter)}, train=train)
