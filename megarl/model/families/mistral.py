"""Mistral dense (7B, Nemo, Small): Llama's layer; its sliding window must not come into play."""

from collections.abc import Mapping
from typing import Any

from megarl.model.families.base import Family
from megarl.model.families.dense import ATTENTION, MLP, NORMS


def _longest(hf: Mapping[str, Any]) -> int | None:
    # transformers' default where config.json is silent.
    return hf.get("sliding_window", 4096)


FAMILY = Family(("mistral",), ATTENTION, MLP, NORMS, lambda hf: {}, longest=_longest)
