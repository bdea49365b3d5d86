# SPDX-License-Identifier: Apache-2.0
"""Convert adapters of experts between PEFT's two kinds of file: the result is PEFT's own, and means the same."""

import json

import pytest
import torch
from safetensors.torch import load_file

from megarl.errors import UnsupportedError
from megarl.lora import load_peft_config
from megarl.lora.files.peft_folder import convert
from megarl.lora.merge import merge_folder
from megarl.model.weights.full_config import names_of
from megarl.model.weights.hf_folder import read_config
from megarl.verify.inputs.adapters import make_adapter
from megarl.verify.reference.hf_peft import load_reference
from tests.helpers.models import make_model

EXPERTS = {"qwen3_moe": ["gate_proj", "up_proj", "down_proj"], "mixtral": ["w1", "w2", "w3"]}
ATTENTION = ["q_proj", "o_proj"]


@pytest.mark.parametrize("family", EXPERTS)
def test_pairs_of_each_expert_are_stacked_as_peft_stacks_them(tmp_path, family):
    """PEFT loads our file with one pair per linear and saves it: bit for bit what we save, and it converts back."""
    model = make_model(tmp_path / "model", family, tied=False, num_hidden_layers=2)
    names = names_of(read_config(model))
    ours = make_adapter(model, tmp_path / "ours")
    load_reference(model, ours).save_pretrained(tmp_path / "peft")
    convert(ours, tmp_path / "stacked", names, "stacked")

    theirs, mine = (load_file(tmp_path / kind / "adapter_model.safetensors") for kind in ("peft", "stacked"))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())
    configs = [json.loads((tmp_path / kind / "adapter_config.json").read_text()) for kind in ("peft", "stacked")]
    for field in ("target_modules", "target_parameters"):
        assert sorted(configs[0][field]) == sorted(configs[1][field])
    assert all(configs[0][field] == configs[1][field] for field in ("r", "rank_pattern", "alpha_pattern"))

    for kind in ("ours", "peft", "stacked"):
        assert merge_folder(model, tmp_path / kind, tmp_path / f"merged-{kind}") == 2 * (4 + 1 + 4 * 3)
    merged = [load_file(tmp_path / f"merged-{kind}" / "model.safetensors") for kind in ("ours", "peft", "stacked")]
    for name, tensor in merged[0].items():
        assert all(torch.equal(other[name], merged[1][name]) for other in merged[1:])
        torch.testing.assert_close(merged[1][name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", EXPERTS)
def test_a_shared_pair_is_given_to_each_expert_and_peft_loads_it(tmp_path, family):
    model = make_model(tmp_path / "model", family, tied=False, num_hidden_layers=2)
    names = names_of(read_config(model))
    parameters = ["gate_up_proj", "down_proj", "gate.weight"]
    make_adapter(model, tmp_path / "stacked", target_modules=ATTENTION, target_parameters=parameters)
    convert(tmp_path / "stacked", tmp_path / "apart", names, "per_expert")
    config = load_peft_config(tmp_path / "apart")
    assert not config.target_parameters
    assert set(config.target_modules) == {*ATTENTION, *EXPERTS[family], "gate"}
    merged = {}
    for kind in ("stacked", "apart"):
        # PEFT itself merges what it loaded.
        merged[kind] = load_reference(model, tmp_path / kind).merge_and_unload().state_dict()
    for name, tensor in merged["stacked"].items():
        torch.testing.assert_close(merged["apart"][name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"target_parameters": ["gate_up_proj"]}, "adapts a part of the routed experts only"),
        (
            {"target_parameters": ["gate_up_proj", "down_proj"], "rank_pattern": {"gate_up_proj": 8}},
            "has another rank or alpha than r and lora_alpha",
        ),
        ({"target_parameters": ["gate_up_proj", "down_proj"], "use_rslora": True}, "use_rslora is true"),
        ({"target_parameters": ["gate_up_proj", "down_proj", "q_proj.weight"]}, "which target_modules cannot say"),
    ],
)
def test_what_would_mean_something_else_for_each_expert_is_refused(tmp_path, settings, part):
    model = make_model(tmp_path / "model", "qwen3_moe", tied=False, num_hidden_layers=1)
    adapter = make_adapter(model, tmp_path / "adapter", target_modules=[], **settings)
    with pytest.raises(UnsupportedError) as failure:
        convert(adapter, tmp_path / "out", names_of(read_config(model)), "per_expert")
    assert part in str(failure.value)
    assert not (tmp_path / "out").exists()
