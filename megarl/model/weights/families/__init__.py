"""Model families by ``model_type``. A new family is one module and one line here."""

from collections.abc import Mapping
from typing import Any

from megarl.errors import UnsupportedError, pick
from megarl.model.weights.families import deepseek, llama, mistral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe
from megarl.model.weights.families.base import Family
from megarl.model.weights.families.completion import FullConfig, complete
from megarl.model.weights.families.weight_map import WeightMap

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


def full_config(hf_config: Mapping[str, Any]) -> FullConfig:
    """A parsed ``config.json`` with transformers' defaults for what it leaves out; see ``completion.complete``.

    Raises:
        ModelError: a value that transformers rejects, or that is no size.
        UnsupportedError: a ``model_type`` that is not registered, or a key that no part of megarl reads.
    """
    return complete(hf_config, family_of(hf_config))


def names_of(hf_config: Mapping[str, Any]) -> WeightMap:
    """The names of the model of a parsed ``config.json``.

    Raises:
        ModelError, UnsupportedError: as ``full_config``.
    """
    return WeightMap(family_of(hf_config), full_config(hf_config))
