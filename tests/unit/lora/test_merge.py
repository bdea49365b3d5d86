# SPDX-License-Identifier: Apache-2.0
"""Test merged export: out of place, with PEFT's logprobs in transformers, and refusals that leave nothing."""

import hashlib
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.errors import AdapterError, ModelError, UnsupportedError
from megarl.lora.merge import merge_folder
from megarl.verify.compare import relative_error
from megarl.verify.inputs.adapters import make_adapter
from megarl.verify.inputs.samples import make_samples
from megarl.verify.reference.hf_peft import load_reference, logprobs_of
from tests.helpers.architectures import write_model
from tests.helpers.models import make_model


def digest(folder):
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(folder.iterdir())}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_merged_folder_gives_pefts_logprobs_and_the_base_is_untouched(tmp_path, family, tied):
    model = make_model(tmp_path / "model", family, tied=tied)
    adapter = make_adapter(
        model, tmp_path / "adapter", use_rslora=True, rank_pattern={"v_proj": 2}, alpha_pattern={"o_proj": 3}
    )
    before = digest(model)
    assert merge_folder(model, adapter, tmp_path / "merged") == 4 * 7
    assert digest(model) == before
    compare_logprobs(tmp_path, model, adapter)
    assert json.loads((tmp_path / "merged/config.json").read_text()) == json.loads((model / "config.json").read_text())


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_merged_experts_give_pefts_logprobs(tmp_path, family):
    model = make_model(tmp_path / "model", family, tied=False)
    adapter = make_adapter(model, tmp_path / "adapter")
    assert merge_folder(model, adapter, tmp_path / "merged") == 4 * (4 + 1 + 4 * 3)
    compare_logprobs(tmp_path, model, adapter)


@pytest.mark.parametrize("architecture", ["glm4", "gemma3_text"])
def test_a_family_that_is_not_listed_merges_by_the_names_of_the_adapters_file(tmp_path, architecture):
    model = write_model(tmp_path / "model", architecture)
    adapter = make_adapter(model, tmp_path / "adapter", rank_pattern={"v_proj": 2})
    before = digest(model)
    merge_folder(model, adapter, tmp_path / "merged")
    assert digest(model) == before
    merged, peft = load_reference(tmp_path / "merged", None), load_reference(model, adapter)
    for sample in make_samples(4, 128):
        with torch.no_grad():
            assert relative_error(logprobs_of(merged, sample), logprobs_of(peft, sample)) < 1e-5


def test_of_such_a_family_only_linears_are_merged(tmp_path):
    model = write_model(tmp_path / "model", "glm4")
    adapter = make_adapter(model, tmp_path / "adapter", target_modules=["embed_tokens", "q_proj"])
    with pytest.raises(UnsupportedError, match=r"embed_tokens.* is not one of a linear's two matrices; .*with PEFT"):
        merge_folder(model, adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def compare_logprobs(tmp_path, model, adapter):
    merged, peft, base = (
        load_reference(tmp_path / "merged", None), load_reference(model, adapter), load_reference(model, None)
    )  # fmt: skip
    for sample in make_samples(4, 131):
        with torch.no_grad():
            expected = logprobs_of(peft, sample)
            assert relative_error(logprobs_of(merged, sample), expected) < 1e-5
            assert relative_error(logprobs_of(base, sample), expected) > 1e-3


def test_bf16_is_rounded_once(tmp_path):
    model = make_model(tmp_path / "model", "llama", tied=False, dtype="bfloat16")
    adapter = make_adapter(model, tmp_path / "adapter")
    merge_folder(model, adapter, tmp_path / "merged")
    name = "model.layers.1.mlp.down_proj"
    base = load_file(model / "model.safetensors")[f"{name}.weight"].double()
    lora = load_file(adapter / "adapter_model.safetensors")
    a, b = (lora[f"base_model.model.{name}.lora_{side}.weight"].double() for side in "AB")
    exact = (base + 2.0 * b @ a).to(torch.bfloat16)
    merged = load_file(tmp_path / "merged" / "model.safetensors")[f"{name}.weight"]
    assert (merged == exact).float().mean() > 0.999
    assert merged.dtype is torch.bfloat16


def test_what_does_not_fit_is_refused_and_leaves_nothing(tmp_path):
    model = make_model(tmp_path / "model", "llama", tied=False)
    other = make_model(tmp_path / "other", "llama", tied=False, hidden_size=64)
    adapter = make_adapter(model, tmp_path / "adapter")
    with pytest.raises(AdapterError, match="layer; the model's is"):
        merge_folder(other, adapter, tmp_path / "out")
    shutil.copytree(adapter, tmp_path / "cut")
    file = tmp_path / "cut" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(AdapterError, match="truncated or damaged"):
        merge_folder(model, tmp_path / "cut", tmp_path / "out")
    with pytest.raises(ModelError, match="exists already"):
        merge_folder(model, adapter, other)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["adapter", "cut", "model", "other"]


def make_any(folder, family):
    return write_model(folder, family) if family == "glm4" else make_model(folder, family, tied=False)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("family", ["llama", "glm4"])
def test_an_adapter_with_a_number_that_is_not_finite_is_named_and_leaves_nothing(tmp_path, family, value):
    model = make_any(tmp_path / "model", family)
    adapter = make_adapter(model, tmp_path / "adapter")
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    name = max(tensors)
    tensors[name][0, 1] = value
    save_file(tensors, file)
    with pytest.raises(AdapterError, match=f"{file}: '{name}' holds a number that is not finite"):
        merge_folder(model, adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("family", ["llama", "glm4"])
def test_a_matrix_that_the_config_does_not_name_is_refused(tmp_path, family):
    model = make_any(tmp_path / "model", family)
    adapter = make_adapter(model, tmp_path / "adapter", target_modules=["q_proj", "v_proj"])
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"target_modules": ["q_proj"]}))
    with pytest.raises(AdapterError, match=r"(holds|adapts) '\S*model\.layers\.0\.self_attn\.v_proj.*, which"):
        merge_folder(model, adapter, tmp_path / "merged")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"target_modules": ["q_proj", "v_proj"]}))
    merge_folder(model, adapter, tmp_path / "merged")
