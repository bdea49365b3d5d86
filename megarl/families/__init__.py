# SPDX-License-Identifier: Apache-2.0
"""Register model families by ``model_type``. A family's module holds all that megarl knows of it. No torch here.

A new family is one module and one line in ``_FAMILIES``, or an object outside the package that ``model.family`` names.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from megarl.errors import ConfigError, UnsupportedError, pick
from megarl.families import deepseek, llama, mistral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe
from megarl.families.base import Family, MoeMap
from megarl.families.weight_map import WeightMap as WeightMap
from megarl.plugins import absolute, load_object

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
# The setting that names the user's own family.
FIELD = "model.family"
FAMILIES: dict[str, Family] = {name: family for family in _FAMILIES for name in family.model_types}


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """Return the family of a parsed ``config.json``.

    Raises:
        UnsupportedError: the ``model_type`` is not registered.
    """
    model_type = str(hf_config.get("model_type"))
    try:
        return pick(FAMILIES, model_type, "model_type in config.json", UnsupportedError)
    except UnsupportedError as error:
        raise UnsupportedError(f"{error}; any model of transformers trains with model.backend=transformers") from None


def moe_of(hf_config: Mapping[str, Any]) -> MoeMap | None:
    """Return the mixture of experts of a ``config.json``'s family; None for dense and for unknown models."""
    family = FAMILIES.get(str(hf_config.get("model_type")))
    return family.moe if family else None


def add_family(spec: str | None, folder: Path | None = None) -> Family | None:
    """Register the user's own family for this process, and return it; its file is imported once.

    Args:
        spec: ``model.family``; None adds nothing.
        folder: folder of the recipe, to which a relative path refers; None: the current folder.

    Raises:
        ConfigError: the object cannot be loaded, it is no ``Family``, or megarl has a family of its ``model_type``.
    """
    if spec is None:
        return None
    family = _own_family(absolute(spec, FIELD, folder or Path()))
    FAMILIES.update(dict.fromkeys(family.model_types, family))
    return family


@cache
def _own_family(spec: str) -> Family:
    """Import a family once, because its file may register classes that cannot be registered twice."""
    family = load_object(spec, FIELD)
    if not isinstance(family, Family):
        raise ConfigError(f"{FIELD} is '{spec}', which is {type(family).__name__}; it must be a Family")
    known = sorted({name for builtin in _FAMILIES for name in builtin.model_types} & set(family.model_types))
    if known:
        raise ConfigError(f"{FIELD} is '{spec}' for model_type '{known[0]}', which megarl knows; set {FIELD}=null")
    return family
