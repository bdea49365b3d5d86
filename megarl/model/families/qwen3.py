"""Qwen3 dense: Llama's layer with an RMSNorm on each query and key head."""

from collections.abc import Mapping
from typing import Any

from megarl.errors import UnsupportedError
from megarl.model.families.base import READ_BY_ALL, Family, VectorMap
from megarl.model.families.dense import ATTENTION, MLP, NORMS

QK_NORMS = (
    VectorMap(("self_attention.q_layernorm.weight",), "self_attn.q_norm.weight"),
    VectorMap(("self_attention.k_layernorm.weight",), "self_attn.k_norm.weight"),
)


def attention_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """``TransformerConfig`` arguments of Qwen3's attention.

    Raises:
        UnsupportedError: sliding-window attention, or biases (mcore has none on the output projection alone).
    """
    if hf["use_sliding_window"]:
        raise UnsupportedError("config.json: use_sliding_window is true; supported is full attention only")
    if hf["attention_bias"]:
        raise UnsupportedError("config.json: attention_bias is true; supported is a qwen3 without biases")
    return {"qk_layernorm": True}


ATTENTION_KEYS = {"head_dim", "attention_bias", "use_sliding_window", "sliding_window"}
READS = READ_BY_ALL | ATTENTION_KEYS | {"max_window_layers", "layer_types"}
FAMILY = Family(("qwen3",), READS, ATTENTION, MLP, NORMS + QK_NORMS, attention_settings)
