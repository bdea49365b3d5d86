"""Llama 2 and 3 (and models published under its architecture, such as SmolLM2)."""

from collections.abc import Mapping
from typing import Any

from megarl.errors import UnsupportedError
from megarl.model.families.base import READ_BY_ALL, Family
from megarl.model.families.dense import ATTENTION, MLP, NORMS


def _settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    if hf["attention_bias"] or hf["mlp_bias"]:
        raise UnsupportedError(
            "config.json: attention_bias/mlp_bias of a llama model; supported is a llama without them"
        )
    return {}


READS = READ_BY_ALL | {"head_dim", "attention_bias", "mlp_bias"}
FAMILY = Family(("llama",), READS, ATTENTION, MLP, NORMS, _settings)
