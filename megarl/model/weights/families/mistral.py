"""Mistral dense (7B, Nemo, Small): Llama's layer, in some releases with a sliding window."""

from collections.abc import Mapping
from typing import Any

from megarl.model.weights.families.base import READ_BY_ALL, Family
from megarl.model.weights.families.dense import ATTENTION, MLP, NORMS


def _window(hf: Mapping[str, Any], layer: int) -> int | None:
    return hf["sliding_window"]


READS = READ_BY_ALL | {"head_dim", "sliding_window"}
FAMILY = Family(("mistral",), READS, ATTENTION, MLP, NORMS, lambda hf: {}, window=_window)
