# SPDX-License-Identifier: Apache-2.0
"""Mistral dense (7B, Nemo, Small): Llama's layer; some releases have a sliding window."""

from collections.abc import Mapping
from typing import Any

from megarl.families.base import READ_BY_ALL, Family, SamplerSupport
from megarl.families.dense import ATTENTION, MLP, NORMS


def _window(hf: Mapping[str, Any], layer: int) -> int | None:
    return hf["sliding_window"]


def _raw_window(raw: Mapping[str, Any]) -> int | None:
    return raw.get("sliding_window", 4096)  # transformers' default


READS = READ_BY_ALL | {"head_dim", "sliding_window"}
SAMPLER = SamplerSupport(window=_raw_window)
FAMILY = Family(("mistral",), READS, ATTENTION, MLP, NORMS, lambda hf: {}, window=_window, sampler=SAMPLER)
