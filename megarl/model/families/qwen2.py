"""Qwen2 and Qwen2.5 (whose ``model_type`` is qwen2 too): Llama's layer with a bias on q, k and v."""

from collections.abc import Mapping
from typing import Any

from megarl.errors import UnsupportedError
from megarl.model.families.base import Family
from megarl.model.families.dense import ATTENTION, MLP, NORMS


def _settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    if hf.get("use_sliding_window"):
        raise UnsupportedError("config.json: use_sliding_window is true; supported is full attention only")
    return {"add_qkv_bias": True}


FAMILY = Family(("qwen2",), ATTENTION, MLP, NORMS, _settings)
