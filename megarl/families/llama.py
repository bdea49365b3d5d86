# SPDX-License-Identifier: Apache-2.0
"""Llama 2 and 3, and models published under its architecture, such as SmolLM2."""

from collections.abc import Mapping
from typing import Any

from megarl.families.base import READ_BY_ALL, Family, SamplerSupport
from megarl.families.dense import ATTENTION, MLP, NORMS, attention_biases


def _settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {"mlp_bias": hf["mlp_bias"], **attention_biases(hf)}


READS = READ_BY_ALL | {"head_dim", "attention_bias", "mlp_bias"}
FAMILY = Family(("llama",), READS, ATTENTION, MLP, NORMS, _settings, sampler=SamplerSupport())
