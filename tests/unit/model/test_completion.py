# SPDX-License-Identifier: Apache-2.0
"""Complete config.json with transformers' defaults, and leave no key unread that changes the model."""

import json

import pytest
from transformers import CONFIG_MAPPING

from megarl.errors import MegarlError, ModelError, UnsupportedError
from megarl.families import FAMILIES, family_of
from megarl.model.weights.full_config import HARMLESS, HARMLESS_PREFIXES, full_config
from tests.helpers.models import FAMILIES as TINY
from tests.helpers.models import SHAPE

# As published, by family; the keys that most folders have beside the sizes.
PUBLISHED = {
    "llama": {
        "_name_or_path": "smol", "architectures": ["LlamaForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "is_llama_config": True, "mlp_bias": False,
        "pad_token_id": 2, "pretraining_tp": 1, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 1e5,
        "torch_dtype": "bfloat16", "transformers.js_config": {"kv_cache_dtype": {}}, "transformers_version": "4.42.3",
        "unsloth_fixed": True, "use_cache": True, "tie_word_embeddings": True, "initializer_range": 0.04,
    },
    "qwen2": {
        "attention_dropout": 0.0, "max_window_layers": 28, "sliding_window": 32768, "use_sliding_window": False,
        "use_mrope": False, "rope_theta": 1e6, "torch_dtype": "bfloat16",
    },
    "qwen2_moe": {
        "decoder_sparse_step": 1, "max_window_layers": 21, "moe_intermediate_size": 1408, "norm_topk_prob": False,
        "num_experts": 60, "num_experts_per_tok": 4, "shared_expert_intermediate_size": 5632, "sliding_window": 32768,
        "use_sliding_window": False, "output_router_logits": False, "router_aux_loss_coef": 0.001,
    },
    "qwen3_moe": {
        "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128, "max_window_layers": 48,
        "mlp_only_layers": [], "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8,
        "output_router_logits": False, "router_aux_loss_coef": 0.001, "rope_scaling": None, "sliding_window": None,
    },
    "mistral": {"head_dim": 128, "rope_theta": 1e6, "sliding_window": None, "attention_dropout": 0.0},
    "deepseek_v2": {
        "attention_bias": False, "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
        "aux_loss_alpha": 0.001, "ep_size": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 1,
        "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False, "num_experts_per_tok": 6,
        "num_key_value_heads": 4, "pretraining_tp": 1, "q_lora_rank": None, "routed_scaling_factor": 1.0,
        "scoring_func": "softmax", "seq_aux": True, "topk_group": 1, "topk_method": "greedy",
        "moe_intermediate_size": 1408, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    },
    "deepseek_v3": {
        "aux_loss_alpha": 0.001, "ep_size": 1, "moe_layer_freq": 1, "num_key_value_heads": 4,
        "num_nextn_predict_layers": 1, "scoring_func": "sigmoid", "seq_aux": True, "topk_method": "noaux_tc",
    },
}  # fmt: skip


@pytest.mark.parametrize("family", PUBLISHED)
def test_configs_as_published_are_understood(family):
    raw = {"model_type": family, **SHAPE, **PUBLISHED[family]}
    before = json.dumps(raw)
    full = full_config(raw)
    family_of(full).settings(full)
    assert json.dumps(raw) == before
    assert full_config(full) is full
    assert full_config(dict(full)) == full


def test_what_deepseek_v3_leaves_out_is_transformers_default():
    full = full_config({"model_type": "deepseek_v3"})
    settings = family_of(full).settings(full)
    assert settings["moe_router_topk_scaling_factor"] == 2.5
    assert (settings["moe_router_num_groups"], settings["moe_router_group_topk"]) == (8, 4)
    assert settings["moe_router_topk"] == 8
    assert full["rms_norm_eps"] == 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_every_default_is_the_classs_own(family):
    shared = full_config({"model_type": family, "num_experts_per_tok": 2} if "v2" in family else {"model_type": family})
    theirs = CONFIG_MAPPING[family]().to_dict() | ({"num_experts_per_tok": 2} if "v2" in family else {})
    assert {key: value for key, value in shared.items() if key != "rope_parameters"} == {
        key: value for key, value in theirs.items() if key != "rope_parameters"
    }


def other_than(value):
    """Return another value of a config field."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return "other" if isinstance(value, str) else {"other": 1}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_of_the_class_is_read_or_harmless_or_refused_by_name(family):
    tiny_class, extra = TINY[family]
    tiny = tiny_class(**{**SHAPE, **extra}).to_dict()
    refused = []
    for key, value in tiny.items():
        if key in FAMILIES[family].reads or key in HARMLESS or key.startswith(HARMLESS_PREFIXES):
            continue
        with pytest.raises(UnsupportedError, match=f"{key} is .* which megarl does not read"):
            full_config(tiny | {key: other_than(value)})
        refused.append(key)
    assert "attention_dropout" in refused


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("is_causal", False),
        ("attention_dropout", 0.1),
        ("quantization_config", {"quant_method": "fp8"}),
        ("logits_scaling", 8.0),
        ("embedding_multiplier", 12),
        ("attn_logit_softcapping", 50.0),
        ("use_qk_norm", True),
        ("moe_layer_freq", 2),
        ("add_cross_attention", True),
        ("residual_multiplier", float("nan")),
    ],
)
def test_a_key_that_changes_the_model_is_refused_by_name(family, key, value):
    raw = {"model_type": family, **SHAPE, **TINY[family][1]}
    full_config(raw)
    with pytest.raises(UnsupportedError, match=f"config.json: {key} is "):
        full_config(raw | {key: value})
    full_config(raw | {key: None})


def test_a_window_that_transformers_ignores_in_llama_is_refused():
    with pytest.raises(UnsupportedError, match="sliding_window is 16"):
        full_config({"model_type": "llama", "sliding_window": 16})


def test_an_unknown_key_of_rope_is_refused_by_name():
    with pytest.raises(UnsupportedError, match=r"rope_scaling\.mrope_section is"):
        full_config({"model_type": "llama", "rope_scaling": {"type": "default", "mrope_section": [16, 24, 24]}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": "4"}, "transformers rejects it"),
        ({"rms_norm_eps": None}, "transformers rejects it"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"num_attention_heads": 0}, "transformers rejects it"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"vocab_size": True}, "vocab_size"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads \(3\) must divide num_attention_heads \(4\)"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"head_dim": 5}, "head_dim"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be at most"),
        ({"vocab_size": 10**9}, "vocab_size is 1000000000; it must be a whole number from 1 to"),
        ({"pad_token_id": 131}, "pad_token_id is 131, but vocab_size is 131"),
        ({"pad_token_id": -132}, "pad_token_id is -132"),
    ],
)
def test_a_value_that_no_model_can_have_is_an_error_that_names_it(change, message):
    with pytest.raises(MegarlError, match=message):
        full_config({"model_type": "llama", **SHAPE} | change)


def test_deepseeks_head_dim_may_be_left_out_but_not_null():
    full_config({"model_type": "deepseek_v3"})
    with pytest.raises(ModelError, match="head_dim is null"):
        full_config({"model_type": "deepseek_v3", "head_dim": None})


def test_two_names_of_one_setting_must_agree():
    with pytest.raises(ModelError, match="num_experts is 4 and num_local_experts 8"):
        full_config({"model_type": "qwen3_moe", "num_experts": 4, "num_local_experts": 8})


@pytest.mark.parametrize("value", ["1", 1.0, -1])
def test_a_count_of_further_layers_that_is_none_is_an_error(value):
    with pytest.raises(ModelError, match="num_nextn_predict_layers is"):
        full_config({"model_type": "deepseek_v3", "num_nextn_predict_layers": value})
