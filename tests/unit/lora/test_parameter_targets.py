# SPDX-License-Identifier: Apache-2.0
"""Resolve PEFT's ``target_parameters`` to linears and ranks as PEFT itself does; test the refusals."""

import math

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from megarl.errors import AdapterError, UnsupportedError
from megarl.lora.files.stacked_experts import locate_matrices
from megarl.lora.targets.parameters import as_parameters, as_peft_reads
from megarl.lora.targets.resolve import expand_all_linear, resolve_targets
from megarl.model.weights.full_config import names_of
from megarl.peft.names import PREFIX
from megarl.peft.rules import rank_and_scaling
from tests.helpers.models import FAMILIES, SHAPE

EVERY = {"qwen3_moe": ["gate_proj", "up_proj", "down_proj"], "mixtral": ["w1", "w2", "w3"]}
EVERY["deepseek_v3"] = EVERY["qwen3_moe"]


def config_of(family: str, **changes: object) -> dict:
    config_class, extra = FAMILIES[family]
    return config_class(**{**SHAPE, **extra, "num_hidden_layers": 2, **changes}).to_dict()


def adapted(hf_config: dict, config: LoraConfig) -> tuple[PeftModel, dict[str, torch.Size]]:
    """Return a model in which PEFT put the adapter, and name -> shape in PEFT's file."""
    with torch.device("meta"):
        model = get_peft_model(AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf_config)), config)
    parameters = model.named_parameters()
    return model, {name.replace(".default", ""): matrix.shape for name, matrix in parameters if ".lora_" in name}


SETTINGS = [
    {"target_modules": [], "target_parameters": ["gate_up_proj", "down_proj", "gate.weight"]},
    {"target_modules": ["o_proj"], "target_parameters": ["experts.down_proj"], "rank_pattern": {"down_proj": 3}},
    {
        "target_modules": ["o_proj"],
        "target_parameters": ["1.mlp.experts.gate_up_proj", "down_proj"],
        "use_rslora": True,
    },
    {"target_modules": ["o_proj", "EXPERTS"], "target_parameters": ["gate.weight"]},
    {"target_modules": ["gate", "EXPERTS"], "target_parameters": ["o_proj.weight"], "alpha_pattern": {"down_proj": 7}},
    {
        "target_modules": [],
        "target_parameters": ["gate_up_proj", "o_proj.weight"],
        "rank_pattern": {"o_proj": 2, "gate_up_proj": 3, r"layers\.0\.mlp\.experts\.gate_up_proj": 5},
        "layers_to_transform": [0],
        "exclude_modules": ["o_proj"],
    },
]


# PEFT does not convert names of this family: those in ``target_modules`` are the shared expert's.
SHARED = [
    SETTINGS[0],
    {"target_modules": ["gate_proj", "shared_expert_gate"], "target_parameters": ["gate_up_proj", "gate.weight"]},
    {
        "target_modules": ["o_proj", "up_proj"],
        "target_parameters": ["shared_expert.down_proj.weight", "experts.down_proj"],
        "rank_pattern": {"up_proj": 3, "shared_expert.down_proj.weight": 2},
        "use_rslora": True,
    },
]
CASES = [(family, settings) for family in EVERY for settings in SETTINGS] + [("qwen2_moe", case) for case in SHARED]


@pytest.mark.parametrize(("family", "settings"), CASES, ids=str)
def test_names_shapes_and_scalings_are_pefts(family, settings):
    """Every tensor of PEFT's own file, from a model in which PEFT put the adapter."""
    listed = [*settings["target_modules"]]
    if "EXPERTS" in listed:
        listed = [name for name in listed if name != "EXPERTS"] + EVERY[family]
    settings = {"r": 4, "lora_alpha": 6, **settings, "target_modules": listed}
    hf_config = config_of(family)
    model, theirs = adapted(hf_config, LoraConfig(**settings))
    names = names_of(hf_config)
    config = as_peft_reads(LoraConfig(**settings), names)
    targets = resolve_targets(config, names)
    places = locate_matrices(targets, names)
    assert {place.file for place in places.values()} == theirs.keys()
    for name, key in targets.items():
        rank, scaling = rank_and_scaling(config, key)
        place = places[f"{PREFIX}{name}.lora_A.weight"]
        assert theirs[place.file][0] == rank * place.experts
        module = model.get_submodule(place.file.removesuffix(".lora_A.weight"))
        assert math.isclose(module.scaling["default"], scaling)


@pytest.mark.parametrize("family", [*EVERY, "qwen2_moe"])
def test_all_linear_is_pefts(family):
    hf_config = config_of(family)
    _, theirs = adapted(hf_config, LoraConfig(target_modules="all-linear"))
    names = names_of(hf_config)
    targets = resolve_targets(
        as_parameters(expand_all_linear(LoraConfig(target_modules="all-linear"), names), names), names
    )
    assert {place.file for place in locate_matrices(targets, names).values()} == theirs.keys()
    assert any("shared_expert_gate" in name for name in theirs) == (family == "qwen2_moe")


@pytest.mark.parametrize("name", ["gate", "experts.1.up_proj"])
def test_a_module_that_peft_has_not_in_qwen2_moe_is_refused_by_name(name):
    with pytest.raises(AdapterError, match=f"target_modules has '{name}', which the model lacks"):
        resolve_targets(LoraConfig(target_modules=[name]), names_of(config_of("qwen2_moe")))


@pytest.mark.parametrize(
    ("settings", "error", "part"),
    [
        ({"target_parameters": ["down_proj"], "lora_dropout": 0.1}, UnsupportedError, "lora_dropout is 0.1"),
        ({"target_parameters": ["embed_tokens.weight"]}, UnsupportedError, "matches 'model.embed_tokens.weight'"),
        ({"target_parameters": ["weight"]}, UnsupportedError, "target_parameters has 'weight', which matches"),
        ({"target_parameters": ["gate_upproj"]}, AdapterError, "which the model lacks; did you mean"),
        ({"target_parameters": ["o_proj.weight"], "target_modules": ["o_proj"]}, AdapterError, "both adapt 'model.lay"),
        ({"target_parameters": ["gate.weight"], "target_modules": ["up_proj"]}, AdapterError, "'up_proj' without 'gat"),
        ({"target_parameters": ["gate.weight"], "target_modules": ".*o_proj"}, UnsupportedError, "the expression"),
    ],
)
def test_what_peft_refuses_or_cannot_mean_is_refused(settings, error, part):
    with pytest.raises(error) as failure:
        resolve_targets(LoraConfig(**{"target_modules": [], **settings}), names_of(config_of("qwen3_moe")))
    assert part in str(failure.value)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_what_no_parameter_stacks_lies_in_the_file_by_its_own_name(model_type):
    """Also the MLP of a dense model, whose last component is that of the stacked experts."""
    names = names_of(config_of(model_type))
    targets = resolve_targets(LoraConfig(target_modules="all-linear"), names)
    places = locate_matrices(targets, names)
    assert {name: place.file for name, place in places.items()} == {name: name for name in places}
    assert len(places) == 2 * len(targets) and all(place.expert is None for place in places.values())


def test_a_dense_model_has_parameters_too():
    names = names_of({"model_type": "llama", "num_hidden_layers": 2})
    targets = resolve_targets(LoraConfig(target_modules=["o_proj"], target_parameters=["q_proj.weight"]), names)
    assert targets["model.layers.1.self_attn.q_proj"] == "model.layers.1.self_attn.q_proj.weight"
    assert len(targets) == 4
