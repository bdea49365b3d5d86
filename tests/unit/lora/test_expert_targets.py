# SPDX-License-Identifier: Apache-2.0
"""Refuse adapters of experts that PEFT or vLLM would compute differently, by name."""

import pytest
from peft import LoraConfig

from megarl.errors import AdapterError, UnsupportedError
from megarl.lora.targets.resolve import resolve_targets
from megarl.model.weights.full_config import names_of

QWEN3_MOE = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": 4}
MIXTRAL = {"model_type": "mixtral", "num_hidden_layers": 2, "num_local_experts": 4}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["gate_proj", "up_proj", "down_proj"]


def resolve(hf_config: dict, **settings: object) -> dict[str, str]:
    return resolve_targets(LoraConfig(**settings), names_of(hf_config))


def test_all_linear_adapts_attention_router_and_every_expert():
    targets = resolve(QWEN3_MOE, target_modules="all-linear")
    assert len(targets) == 2 * (4 + 1 + 4 * 3)
    assert {"model.layers.1.mlp.gate", "model.layers.0.mlp.experts.3.up_proj"} <= targets.keys()
    targets = resolve(MIXTRAL, target_modules=["w1", "w2", "w3"])
    assert set(targets) == {
        f"model.layers.{layer}.block_sparse_moe.experts.{e}.w{w}"
        for layer in (0, 1)
        for e in range(4)
        for w in (1, 2, 3)
    }


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"target_modules": ["gate_proj", "up_proj"]}, "part of the routed experts only (not 'model.layers.0.mlp.exp"),
        ({"target_modules": ["experts.1.up_proj"]}, "part of the routed experts only"),
        ({"target_modules": EXPERTS, "layers_to_transform": [1]}, "(not 'model.layers.0.mlp.experts.0.down_proj')"),
        ({"target_modules": ["gate"], "layers_to_transform": [0]}, "part of the router only"),
        ({"target_modules": ".*proj"}, "target_modules is an expression that matches routers or experts"),
        ({"target_modules": r".*\.0\.self_attn\.q_proj"}, "it would adapt 'model.layers.1.self_attn.q_proj' too"),
        ({"target_modules": EXPERTS, "lora_dropout": 0.1}, "lora_dropout is 0.1"),
        ({"target_modules": EXPERTS, "use_rslora": True}, "use_rslora is true"),
        ({"target_modules": EXPERTS, "rank_pattern": {"up_proj": 2}}, "rank_pattern matches 'model.layers.0.mlp.exp"),
        ({"target_modules": ["gate"], "alpha_pattern": {"gate": 2}}, "alpha_pattern matches 'model.layers.0.mlp.gate'"),
    ],
)
def test_what_others_compute_differently_is_refused(settings, part):
    with pytest.raises(UnsupportedError) as failure:
        resolve(QWEN3_MOE, **settings)
    assert part in str(failure.value)


def test_the_same_settings_on_attention_alone_are_allowed():
    settings = {"lora_dropout": 0.1, "use_rslora": True, "rank_pattern": {"q_proj": 2}, "layers_to_transform": [1]}
    assert len(resolve(QWEN3_MOE, target_modules=ATTENTION, **settings)) == 4


def test_layers_without_experts():
    mixed = QWEN3_MOE | {"mlp_only_layers": [0]}
    chosen = resolve(mixed, target_modules="all-linear")
    assert "model.layers.1.mlp.experts.0.down_proj" in chosen
    assert "model.layers.0.mlp.down_proj" not in chosen  # PEFT takes the name for the experts'
    with pytest.raises(UnsupportedError, match=r"has '0.mlp.down_proj', but PEFT cannot adapt 'model.layers.0.mlp.dow"):
        resolve(mixed, target_modules=["0.mlp.down_proj"])
    assert len(resolve(mixed, target_modules=[*ATTENTION, "gate"])) == 2 * 4 + 1
    with pytest.raises(AdapterError, match="'w1', which the model lacks"):
        resolve(mixed, target_modules=["w1"])
