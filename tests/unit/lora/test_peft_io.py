# SPDX-License-Identifier: Apache-2.0
"""Read ``adapter_config.json``."""

import json

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from megarl.errors import AdapterError, UnsupportedError
from megarl.lora import load_peft_config
from megarl.lora.files.peft_folder import config_dict, write
from megarl.lora.targets.resolve import resolve_targets
from megarl.model.weights.full_config import names_of
from megarl.peft.rules import rank_and_scaling
from tests.helpers.models import SHAPE


@pytest.mark.parametrize("start", [True, False, "gaussian", "orthogonal", "eva"])
def test_a_start_that_left_the_base_alone_is_forgotten(tmp_path, start):
    LoraConfig(target_modules=["q_proj"], init_lora_weights=start).save_pretrained(tmp_path)
    assert load_peft_config(tmp_path).init_lora_weights is True


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora"])
def test_a_start_that_changed_the_base_is_refused_with_the_way_out(tmp_path, start):
    LoraConfig(target_modules=["q_proj"], init_lora_weights=start).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match=f"init_lora_weights is '{start}'.*path_initial_model_for_weight_conv"):
        load_peft_config(tmp_path)


PATTERNS = [
    {"q_proj": 2, r"layers\.0\.self_attn\.q_proj": 3},
    {"self_attn.q_proj": 2, "q_proj": 3, "v.*": 5, ".*_proj": 6},
    {r"layers\.1\.self_attn\.v_proj": 7, "v_proj": 3, ".*": 2},
]


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_the_order_of_patterns_that_peft_lost_when_it_saved_is_found_again(tmp_path, pattern):
    """PEFT itself refuses its own file then. The ranks, and so the scalings, are those of the trained model."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "rank_pattern": pattern}
    hf_config = transformers.LlamaConfig(**SHAPE | {"num_hidden_layers": 2})
    model = get_peft_model(transformers.AutoModelForCausalLM.from_config(hf_config), LoraConfig(**settings))
    model.save_pretrained(tmp_path)
    config = load_peft_config(tmp_path)
    names = names_of(hf_config.to_dict())
    for name in resolve_targets(config, names):
        module = model.get_submodule(f"base_model.model.{name}")
        assert rank_and_scaling(config, name) == (module.r["default"], module.scaling["default"])
    # PEFT can load what is saved from here.
    write(tmp_path / "again", load_file(tmp_path / "adapter_model.safetensors"), config_dict(config, names))
    base = transformers.AutoModelForCausalLM.from_config(hf_config)
    again = PeftModel.from_pretrained(base, tmp_path / "again").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items() if ".lora_" in name)


def test_alphas_whose_order_nothing_tells_are_refused(tmp_path):
    settings = {"target_modules": ["q_proj"], "rank_pattern": PATTERNS[0], "alpha_pattern": {"q_proj": 3, ".*proj": 5}}
    hf_config = transformers.LlamaConfig(**SHAPE | {"num_hidden_layers": 1})
    model = get_peft_model(transformers.AutoModelForCausalLM.from_config(hf_config), LoraConfig(**settings))
    model.save_pretrained(tmp_path)
    with pytest.raises(AdapterError, match="several keys of alpha_pattern fit 'model"):
        load_peft_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_rslora": "yes"}, "'use_rslora' is 'yes': input should be a valid boolean"),
        ({"lora_alpha": 0}, "'lora_alpha' is 0: input should be greater than 0"),
        ({"r": 0}, "'r' is 0"),
        ({"r": 2.5}, "'r' is 2.5"),
        ({"lora_dropout": 1.5}, "'lora_dropout' is 1.5"),
        ({"target_modules": "["}, "is not a regular expression"),
        ({"target_modules": [True]}, "'target_modules.0' is True"),
        ({"rank_pattern": {"v_proj": None}}, "'rank_pattern.v_proj' is None"),
        ({"rank_pattern": None}, "'rank_pattern' is None"),
        ({"alpha_pattern": {"(": 3}}, "is not a regular expression"),
        ({"alpha_pattern": {"v_proj": -1}}, "'alpha_pattern.v_proj' is -1"),
        ({"layers_pattern": 10**19}, "'layers_pattern' is 1000"),
        ({"task_type": 1}, "PEFT refuses it: Invalid task type"),
        ({"velora_config": 0.5}, "PEFT refuses it"),
    ],
    ids=str,
)
def test_a_wrong_field_is_refused_by_name(tmp_path, changes, message):
    LoraConfig(target_modules=["q_proj"]).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(AdapterError, match=r"adapter_config\.json: ") as caught:
        load_peft_config(tmp_path)
    assert message in str(caught.value)


@pytest.mark.parametrize("content", [b"\xff{}", b"[" * 100_000, b"{", b"[1]", None])
def test_a_file_that_is_no_config_is_refused_by_name(tmp_path, content):
    adapter = tmp_path / "adapter"
    if content is None:
        adapter.write_text("a file where the folder should be")
    else:
        adapter.mkdir()
        (adapter / "adapter_config.json").write_bytes(content)
    with pytest.raises(AdapterError, match=r"adapter_config\.json"):
        load_peft_config(adapter)
