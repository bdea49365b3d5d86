"""Model families by ``model_type``. A new family is one module and one line here."""

from collections.abc import Mapping
from typing import Any

from megarl.errors import UnsupportedError, pick
from megarl.model.families import llama, qwen2, qwen3
from megarl.model.families.base import Family

_FAMILIES = (llama.FAMILY, qwen2.FAMILY, qwen3.FAMILY)
FAMILIES: dict[str, Family] = {name: family for family in _FAMILIES for name in family.model_types}


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """Return the family of a parsed ``config.json``.

    Raises:
        UnsupportedError: its ``model_type`` is not registered.
    """
    return pick(FAMILIES, str(hf_config.get("model_type")), "model_type in config.json", UnsupportedError)
