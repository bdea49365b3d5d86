# SPDX-License-Identifier: Apache-2.0
"""Registry of model families by ``model_type``. Each family's module holds all that megarl knows of it. No torch here.

A new family is one module and one line in ``_FAMILIES``.
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
        UnsupportedError: the ``model_type`` is not registered.
    """
    return pick(FAMILIES, str(hf_config.get("model_type")), "model_type in config.json", UnsupportedError)
