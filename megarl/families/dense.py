# SPDX-License-Identifier: Apache-2.0
"""The layer of Llama, Mistral, Qwen2 and Qwen3: grouped-query attention and a gated MLP, each behind an RMSNorm."""

from collections.abc import Mapping
from typing import Any

from megarl.families.base import LinearMap, VectorMap


def _attention_bias(hf: Mapping[str, Any], layer: int) -> bool:
    return bool(hf.get("attention_bias"))


def _mlp_bias(hf: Mapping[str, Any], layer: int) -> bool:
    return bool(hf.get("mlp_bias"))


QKV = LinearMap(
    "self_attention.linear_qkv",
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "column",
    "qkv",
    bias=_attention_bias,
)
OUT = LinearMap("self_attention.linear_proj", ("self_attn.o_proj",), "row", bias=_attention_bias)
ATTENTION = (QKV, OUT)

MLP = (
    LinearMap("mlp.linear_fc1", ("mlp.gate_proj", "mlp.up_proj"), "column", "gated", bias=_mlp_bias),
    LinearMap("mlp.linear_fc2", ("mlp.down_proj",), "row", bias=_mlp_bias),
)


def attention_biases(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``PackedConfig`` arguments of attention in which all four projections have a bias, or none has."""
    return {"add_qkv_bias": hf["attention_bias"], "attention_bias": hf["attention_bias"]}


NORMS = (
    VectorMap(("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"), "input_layernorm.weight"),
    VectorMap(("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"), "post_attention_layernorm.weight"),
)
