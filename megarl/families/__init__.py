# SPDX-License-Identifier: Apache-2.0
"""Model families by ``model_type``: all that megarl knows of one is in its module. Imports no torch.

A new family is one module and one line here.
"""

from collections.abc import Mapping
from typing import Any

from megarl.errors import UnsupportedError, pick
from megarl.families import deepseek, llama, mistral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe
from megarl.families.base import Family
from megarl.families.weight_map import WeightMap as WeightMap

_FAMILIES = (
    deepseek.V2,
    deepseek.V3,
    llama.FAMILY,
    mistral.FAMILY,
    mixtral.FAMILY,
    qwen2.FAMILY,
    qwen2_moe.FAMILY,
    qwen3.FAMILY,
    qwen3_moe.FAMILY,
)
FAMILIES: dict[str, Family] = {name: family for family in _FAMILIES for name in family.model_types}


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """Return the family of a parsed ``config.json``.

    Raises:
        UnsupportedError: its ``model_type`` is not registered.
    """
    return pick(FAMILIES, str(hf_config.get("model_type")), "model_type in config.json", UnsupportedError)
