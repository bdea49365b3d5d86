# SPDX-License-Identifier: Apache-2.0
"""Tell what a case needs to know of its model, whether its family is listed or only transformers knows it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.families import FAMILIES, WeightMap
from megarl.families.base import MoeMap
from megarl.model.weights.full_config import names_of
from megarl.model.weights.hf_folder import parse_json, read_config

# Keys of config.json for the number of routed experts, in any family (the last: ERNIE 4.5, DBRX).
EXPERT_COUNTS = (*MoeMap.count_keys, "moe_num_experts")


def is_listed(model: Path) -> bool:
    """Return True if the model's family has names here."""
    return parse_json(model / "config.json").get("model_type") in FAMILIES


def names_if_listed(model: Path) -> WeightMap | None:
    """Return the model's tensor names; None for an architecture that only transformers knows."""
    return names_of(read_config(model)) if is_listed(model) else None


def shape_of(model: Path) -> Mapping[str, Any]:
    """Return config.json, completed with transformers' defaults.

    Raises:
        ModelError, UnsupportedError: see ``read_config`` and ``megarl.hf.load.load_config``.
    """
    if is_listed(model):
        return read_config(model)
    from megarl.hf.load import load_config

    return load_config(model).get_text_config().to_dict()


def has_experts(model: Path) -> bool:
    """Return True if routers choose experts in some layer."""
    if names := names_if_listed(model):
        return bool(names.num_experts)
    shape = shape_of(model)
    sections = [shape, *(value for value in shape.values() if isinstance(value, Mapping))]
    return any(section.get(key) for section in sections for key in EXPERT_COUNTS)
