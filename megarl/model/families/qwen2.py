"""Qwen2 and Qwen2.5 (whose ``model_type`` is qwen2 too): Llama's layer with a bias on q, k and v."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megarl.errors import UnsupportedError
from megarl.model.families.base import READ_BY_ALL, Family, everywhere
from megarl.model.families.dense import MLP, NORMS, OUT, QKV


def _settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    if hf["use_sliding_window"]:
        raise UnsupportedError("config.json: use_sliding_window is true; supported is full attention only")
    return {"add_qkv_bias": True}


ATTENTION = (replace(QKV, bias=everywhere), OUT)
READS = READ_BY_ALL | {"head_dim", "use_sliding_window", "sliding_window", "max_window_layers", "layer_types"}
FAMILY = Family(("qwen2",), READS, ATTENTION, MLP, NORMS, _settings)
