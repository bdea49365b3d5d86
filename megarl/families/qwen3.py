# SPDX-License-Identifier: Apache-2.0
"""Qwen3 dense: Llama's layer with an RMSNorm on each query head and each key head."""

from collections.abc import Mapping
from typing import Any

from megarl.families.base import READ_BY_ALL, Family, SamplerSupport, VectorMap
from megarl.families.dense import ATTENTION, MLP, NORMS, attention_biases
from megarl.families.qwen2 import layer_window, raw_window

QK_NORMS = (
    VectorMap(("self_attention.q_layernorm.weight",), "self_attn.q_norm.weight"),
    VectorMap(("self_attention.k_layernorm.weight",), "self_attn.k_norm.weight"),
)


def attention_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``PackedConfig`` arguments of Qwen3's attention."""
    return {"qk_layernorm": True, **attention_biases(hf)}


def _refused(raw: Mapping[str, Any]) -> str | None:
    # vLLM's class gives q, k and v a bias, but not the output projection.
    return "attention_bias true" if raw.get("attention_bias") else None


SAMPLER = SamplerSupport(_refused, raw_window)
ATTENTION_KEYS = {"head_dim", "attention_bias", "use_sliding_window", "sliding_window"}
READS = READ_BY_ALL | ATTENTION_KEYS | {"max_window_layers", "layer_types"}
FAMILY = Family(
    ("qwen3",), READS, ATTENTION, MLP, NORMS + QK_NORMS, attention_settings, window=layer_window, sampler=SAMPLER
)
