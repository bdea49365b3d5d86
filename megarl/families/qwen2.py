# SPDX-License-Identifier: Apache-2.0
"""Qwen2 and Qwen2.5 (also ``model_type`` qwen2): Llama's layer with a bias on q, k and v."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megarl.errors import ModelError
from megarl.families.base import READ_BY_ALL, Family, SamplerSupport, everywhere
from megarl.families.dense import MLP, NORMS, OUT, QKV


def _settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {"add_qkv_bias": True}


def layer_window(hf: Mapping[str, Any], layer: int) -> int | None:
    """Return the window of a layer that ``layer_types`` gives one.

    Raises:
        ModelError: ``layer_types`` does not name one of the two kinds for each layer, or there is no window.
    """
    kinds = hf["layer_types"]
    if len(kinds) != hf["num_hidden_layers"] or not {"full_attention", "sliding_attention"}.issuperset(kinds):
        raise ModelError(
            f"config.json: layer_types must name full_attention or sliding_attention for each of the "
            f"{hf['num_hidden_layers']} layers; it is {kinds}"
        )
    if kinds[layer] == "full_attention":
        return None
    if not hf["sliding_window"]:
        raise ModelError("config.json: layer_types has sliding_attention, but there is no window: use_sliding_window")
    return hf["sliding_window"]


def raw_window(raw: Mapping[str, Any]) -> int | None:
    """Return the window that a config.json of Qwen's families, complete or not, switches on."""
    return raw.get("sliding_window") if raw.get("use_sliding_window") else None


ATTENTION = (replace(QKV, bias=everywhere), OUT)
READS = READ_BY_ALL | {"head_dim", "use_sliding_window", "sliding_window", "max_window_layers", "layer_types"}
SAMPLER = SamplerSupport(window=raw_window)
FAMILY = Family(("qwen2",), READS, ATTENTION, MLP, NORMS, _settings, window=layer_window, sampler=SAMPLER)
