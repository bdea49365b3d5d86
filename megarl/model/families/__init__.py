"""Model families by ``model_type``. A new family is one module and one line here."""

from collections.abc import Mapping
from typing import Any

from megarl.errors import UnsupportedError, pick
from megarl.model.families import llama, mixtral, qwen2, qwen3, qwen3_moe
from megarl.model.families.base import Family
from megarl.model.families.weight_map import WeightMap

_FAMILIES = (llama.FAMILY, mixtral.FAMILY, qwen2.FAMILY, qwen3.FAMILY, qwen3_moe.FAMILY)
FAMILIES: dict[str, Family] = {name: family for family in _FAMILIES for name in family.model_types}


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """Return the family of a parsed ``config.json``.

    Raises:
        UnsupportedError: its ``model_type`` is not registered.
    """
    return pick(FAMILIES, str(hf_config.get("model_type")), "model_type in config.json", UnsupportedError)


def names_of(hf_config: Mapping[str, Any]) -> WeightMap:
    """The names of the model of a parsed ``config.json``.

    Raises:
        UnsupportedError: its ``model_type`` is not registered.
    """
    return WeightMap(family_of(hf_config), hf_config)
