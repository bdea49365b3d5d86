# SPDX-License-Identifier: Apache-2.0
"""Decide which layers have a sliding window, and which linears a bias, as transformers does."""

import pytest

from megarl.errors import ModelError, UnsupportedError
from megarl.families import family_of
from megarl.model.weights.full_config import full_config, names_of

MIXED = ["full_attention", "sliding_attention"] * 2


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"model_type": "mistral"}, [4096] * 4),
        ({"model_type": "mistral", "sliding_window": 16}, [16] * 4),
        ({"model_type": "mistral", "sliding_window": None}, [None] * 4),
        ({"model_type": "mixtral", "sliding_window": 16}, [16] * 4),
        ({"model_type": "mixtral"}, [None] * 4),
        ({"model_type": "llama"}, [None] * 4),
        ({"model_type": "qwen2", "sliding_window": 16}, [None] * 4),
        ({"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": True}, [None] * 4),
        (
            {"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": True, "max_window_layers": 3},
            [None, None, None, 16],
        ),
        (
            {"model_type": "qwen3", "sliding_window": 16, "use_sliding_window": True, "layer_types": MIXED},
            [None, 16] * 2,
        ),
        ({"model_type": "qwen2_moe", "sliding_window": 0, "use_sliding_window": False}, [None] * 4),
        ({"model_type": "qwen2_moe", "sliding_window": 32768}, [None] * 4),
        (
            {"model_type": "qwen2_moe", "sliding_window": 16, "use_sliding_window": True, "max_window_layers": 3},
            [16, None, 16, None],
        ),
        ({"model_type": "qwen3_moe", "sliding_window": 16, "use_sliding_window": True}, [16] * 4),
        ({"model_type": "qwen3_moe", "sliding_window": 16}, [None] * 4),
    ],
)
def test_each_layers_window_is_transformers(config, windows):
    full = full_config(config | {"num_hidden_layers": 4})
    assert [family_of(full).window(full, layer) for layer in range(4)] == windows


@pytest.mark.parametrize(
    "layer_types", [MIXED[:3], ["full_attention"] * 3 + ["chunked_attention"], MIXED], ids=["few", "kind", "windowless"]
)
def test_layer_types_that_mean_nothing_are_an_error(layer_types):
    with pytest.raises(ModelError):
        full = full_config({"model_type": "qwen2", "num_hidden_layers": 4, "layer_types": layer_types})
        for layer in range(4):
            family_of(full).window(full, layer)


@pytest.mark.parametrize(
    ("config", "biased"),
    [
        ({"model_type": "llama"}, set()),
        ({"model_type": "qwen2"}, {"q_proj", "k_proj", "v_proj"}),
        ({"model_type": "qwen2_moe"}, {"q_proj", "k_proj", "v_proj"}),
        ({"model_type": "qwen2_moe", "qkv_bias": False}, set()),
        ({"model_type": "qwen3", "attention_bias": True}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ({"model_type": "llama", "mlp_bias": True}, {"gate_proj", "up_proj", "down_proj"}),
    ],
)
def test_biases_are_those_of_the_family(config, biased):
    names = names_of(config | {"num_hidden_layers": 1}).tensor_names()
    assert {name.split(".")[-2] for name in names if name.endswith(".bias")} == biased


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mixtral", "num_experts_per_tok": 1}, "num_experts_per_tok is 1 where"),
        ({"model_type": "qwen3_moe", "num_experts_per_tok": 1, "norm_topk_prob": True}, "num_experts_per_tok is 1"),
        ({"model_type": "qwen3_moe", "num_experts_per_tok": 129}, r"\(129\) exceeds the 128 experts"),
        ({"model_type": "deepseek_v3", "n_group": 7}, r"n_group \(7\) must divide n_routed_experts \(256\)"),
        ({"model_type": "deepseek_v3", "topk_group": 9}, r"topk_group \(9\) of them must hold"),
    ],
)
def test_routing_that_no_layer_here_computes_is_refused_by_name(config, message):
    full = full_config(config)
    with pytest.raises((ModelError, UnsupportedError), match=message):
        family_of(full).settings(full)


def test_a_token_may_take_one_expert_whose_weight_is_not_scaled():
    full = full_config({"model_type": "qwen3_moe", "num_experts_per_tok": 1, "norm_topk_prob": False})
    assert family_of(full).settings(full)["moe_router_topk"] == 1
