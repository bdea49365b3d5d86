# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V2 and V3: multi-latent attention (MLA), and from some layer on shared and routed experts.

DeepSeek-V2 (arXiv:2405.04434) routes by softmax and ranks groups by their best expert. V3 (arXiv:2412.19437) routes by
sigmoid, ranks groups by their best two experts, and has a bias that affects only the choice of experts. Moonlight is
published under V3's ``model_type``. Multi-token-prediction layers beyond ``num_hidden_layers`` are neither loaded nor
exported, as in transformers.

Adapters of the shared experts, and of the MLP in layers without experts, must be named in ``target_parameters``: in
``target_modules`` PEFT takes ``gate_proj``, ``up_proj`` and ``down_proj`` for the routed experts'
(``WeightMap.shadowed_names``).
"""

from collections.abc import Mapping
from typing import Any

from megarl.errors import ModelError, UnsupportedError
from megarl.families.base import READ_BY_ALL, Family, LinearMap, MoeMap, VectorMap
from megarl.families.dense import MLP, NORMS
from megarl.families.moe import TINY_EXPERTS, expert_settings, experts, router, shared_experts


def _compresses_queries(hf: Mapping[str, Any], layer: int) -> bool:
    return hf["q_lora_rank"] is not None


def _plain_queries(hf: Mapping[str, Any], layer: int) -> bool:
    return not _compresses_queries(hf, layer)


def _sparse(hf: Mapping[str, Any], layer: int) -> bool:
    return layer >= (hf["first_k_dense_replace"] or 0)


ATTENTION = (
    LinearMap("self_attention.linear_q_proj", ("self_attn.q_proj",), "column", in_layer=_plain_queries),
    LinearMap("self_attention.linear_q_down_proj", ("self_attn.q_a_proj",), "column", in_layer=_compresses_queries),
    LinearMap("self_attention.linear_q_up_proj", ("self_attn.q_b_proj",), "column", in_layer=_compresses_queries),
    LinearMap("self_attention.linear_kv_down_proj", ("self_attn.kv_a_proj_with_mqa",), "column"),
    LinearMap("self_attention.linear_kv_up_proj", ("self_attn.kv_b_proj",), "column"),
    LinearMap("self_attention.linear_proj", ("self_attn.o_proj",), "row"),
)
LATENT_NORMS = (
    VectorMap(("self_attention.q_layernorm.weight",), "self_attn.q_a_layernorm.weight", _compresses_queries),
    VectorMap(("self_attention.kv_layernorm.weight",), "self_attn.kv_a_layernorm.weight"),
)
MOE = MoeMap(
    linears=(router("mlp.gate"), *shared_experts("mlp.shared_experts")),
    experts=experts("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj"),
    sparse=_sparse,
    says_dense=lambda raw: bool(raw.get("first_k_dense_replace")),
)


def _splits(hf: Mapping[str, Any]) -> dict[str, int | None]:
    """Return the sizes of latent attention and of the shared experts; a product only if both factors are given."""
    sizes = {"q_lora_rank": hf.get("q_lora_rank")}
    latent, rotated = hf.get("kv_lora_rank"), hf.get("qk_rope_head_dim")
    shared, inner = hf.get("n_shared_experts"), hf.get("moe_intermediate_size")
    return sizes | {
        "kv_lora_rank + qk_rope_head_dim": latent + rotated if latent and rotated else None,
        "n_shared_experts x moe_intermediate_size": shared * inner if shared and inner else None,
    }


# Query and key heads of 24 (16 without RoPE, 8 with), value heads of 12.
TINY_LATENT = TINY_EXPERTS | {
    "n_routed_experts": 8, "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
    "q_lora_rank": 16, "kv_lora_rank": 20, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "qk_head_dim": 24,
    "v_head_dim": 12,
}  # fmt: skip


def _attention_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    heads, kv_heads = hf["num_attention_heads"], hf["num_key_value_heads"]
    if kv_heads != heads:
        raise UnsupportedError(
            f"config.json: num_key_value_heads is {kv_heads}, num_attention_heads {heads}; multi-latent attention has "
            "as many of both"
        )
    for field in ("attention_bias", "mlp_bias"):
        if hf.get(field):
            raise UnsupportedError(f"config.json: {field} is true; supported is false")
    if not hf.get("rope_interleave", True):
        raise UnsupportedError(f"config.json: rope_interleave is {hf['rope_interleave']}; supported is true")
    return _logit_scale(hf) | {
        "kv_channels": hf["qk_rope_head_dim"],
        "q_lora_rank": hf["q_lora_rank"],
        "kv_lora_rank": hf["kv_lora_rank"],
        "qk_head_dim": hf["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": hf["qk_rope_head_dim"],
        "v_head_dim": hf["v_head_dim"],
    }


def _logit_scale(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return YaRN's factor of the attention logits. ``megarl.model.layers.attention.rope`` has its frequencies."""
    rope = hf["rope_parameters"]
    if rope["rope_type"] != "yarn":
        return {}
    mscale, of_logits = rope.get("mscale"), rope.get("mscale_all_dim")
    if not mscale or mscale != of_logits or rope.get("attention_factor") not in (None, 1.0):
        # Any other combination would scale only the rotary part of queries and keys.
        raise UnsupportedError(
            f"config.json: yarn has mscale {mscale}, mscale_all_dim {of_logits} and attention_factor "
            f"{rope.get('attention_factor')}; supported with multi-latent attention are equal mscale and mscale_all_dim"
        )
    return {"rotary_scaling_factor": rope["factor"], "mscale_all_dim": of_logits}


def _moe_settings(hf: Mapping[str, Any], *, renormalise: bool, groups: bool) -> dict[str, Any]:
    pattern = [int(_sparse(hf, layer)) for layer in range(hf["num_hidden_layers"])]
    settings = expert_settings(hf, MOE, renormalise=renormalise)
    if groups and (hf["n_group"] or 1) > 1:
        settings |= {"moe_router_num_groups": hf["n_group"], "moe_router_group_topk": hf["topk_group"]}
    _check_groups(hf)
    return settings | {
        "moe_layer_freq": pattern,
        "moe_shared_expert_intermediate_size": hf["n_shared_experts"] * hf["moe_intermediate_size"],
        "moe_router_topk_scaling_factor": hf["routed_scaling_factor"],
        "moe_router_dtype": "fp32",
    }


def _check_groups(hf: Mapping[str, Any]) -> None:
    """Check that groups divide the experts, and that the best groups hold enough experts for a token."""
    groups, best, experts_of = hf["n_group"] or 1, hf["topk_group"] or 1, hf["n_routed_experts"]
    chosen = hf["num_experts_per_tok"]
    if experts_of % groups or best > groups or chosen > best * (experts_of // groups):
        raise ModelError(
            f"config.json: n_group ({groups}) must divide n_routed_experts ({experts_of}), and topk_group ({best}) of "
            f"them must hold num_experts_per_tok ({chosen}) experts"
        )


def _settings_v2(hf: Mapping[str, Any]) -> dict[str, Any]:
    if hf.get("scoring_func", "softmax") != "softmax":
        raise UnsupportedError(
            f"config.json: scoring_func is '{hf['scoring_func']}'; supported of deepseek_v2 is 'softmax'"
        )
    method = hf["topk_method"]
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedError(
            f"config.json: topk_method is '{method}'; supported of deepseek_v2 are greedy and group_limited_greedy"
        )
    if method == "greedy" and (hf["n_group"] or 1) > 1:
        # transformers ignores the groups in this case; vLLM does not.
        raise UnsupportedError(f"config.json: n_group is {hf['n_group']} with topk_method 'greedy'; supported is 1")
    if hf["norm_topk_prob"]:
        # transformers ignores the key in this family; the model's own code does not.
        raise UnsupportedError("config.json: norm_topk_prob is true; supported of deepseek_v2 is false")
    return _attention_settings(hf) | _moe_settings(hf, renormalise=False, groups=method == "group_limited_greedy")


def _settings_v3(hf: Mapping[str, Any]) -> dict[str, Any]:
    for field, supported in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")):
        # transformers reads neither key; vLLM reads both.
        if hf.get(field, supported) != supported:
            raise UnsupportedError(f"config.json: {field} is '{hf[field]}'; supported of deepseek_v3 is '{supported}'")
    if not hf["norm_topk_prob"]:
        raise UnsupportedError("config.json: norm_topk_prob is false; supported of deepseek_v3 is true")
    settings = _moe_settings(hf, renormalise=True, groups=True)
    return _attention_settings(hf) | settings | {"moe_router_score_function": "sigmoid"}


READS = READ_BY_ALL | {
    "first_k_dense_replace", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "n_group", "topk_group", "n_routed_experts", "num_experts", "num_local_experts", "num_experts_per_tok",
    "n_shared_experts", "moe_intermediate_size", "routed_scaling_factor", "topk_method", "norm_topk_prob",
    "attention_bias", "scoring_func",
}  # fmt: skip
V2 = Family(
    ("deepseek_v2",),
    READS | {"mlp_bias"},
    ATTENTION,
    MLP,
    NORMS + LATENT_NORMS,
    _settings_v2,
    MOE,
    splits=_splits,
    tiny=TINY_LATENT,
)
V3 = Family(
    ("deepseek_v3",),
    READS | {"rope_interleave", "num_nextn_predict_layers", "num_mtp_layers"},
    ATTENTION,
    MLP,
    (*NORMS, *LATENT_NORMS, VectorMap(("mlp.router.expert_bias",), "mlp.gate.e_score_correction_bias", _sparse)),
    _settings_v3,
    MOE,
    splits=_splits,
    tiny=TINY_LATENT,
)
