# SPDX-License-Identifier: Apache-2.0
"""Check values of a PEFT config that PEFT accepts although they are wrong.

PEFT checks none of them when it reads a file: ``use_rslora: "no"`` would count as true, and an alpha of 0 as no
adapter.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from peft import LoraConfig
from peft.utils.other import get_pattern_key
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megarl.config.explain import explain
from megarl.config.sections.lora import Pattern
from megarl.errors import AdapterError, nearest

Rank = Annotated[int, Field(ge=1, le=2**20)]
# A largest value is needed: Python's integers have none, and JSON's 1e400 is read as infinity.
Alpha = Annotated[float, Field(gt=0.0, le=2.0**53, allow_inf_nan=False)]
Modules = Pattern | list[str] | None


class _Fields(BaseModel):
    """Types and ranges of the fields that decide what an adapter computes, or that make PEFT fail."""

    model_config = ConfigDict(extra="ignore", strict=True)

    r: Rank = 8
    lora_alpha: Alpha = 8
    lora_dropout: float = Field(0.0, ge=0.0, lt=1.0)
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    lora_bias: bool = False
    inference_mode: bool = False
    target_modules: Modules = None
    exclude_modules: Modules = None
    target_parameters: list[str] | None = None
    rank_pattern: dict[Pattern, Rank] = Field(default_factory=dict)
    alpha_pattern: dict[Pattern, Alpha] = Field(default_factory=dict)
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[Pattern] | Pattern | None = None
    bias: Literal["none", "all", "lora_only"] = "none"
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None


def check_values(config: LoraConfig | Mapping[str, Any], subject: str = "adapter config") -> None:
    """Refuse values of a wrong type or range.

    Args:
        config: PEFT's config, or the contents of ``adapter_config.json``.
        subject: start of the error message.

    Raises:
        AdapterError: a field is wrong. One line per field has its name, its value and what it must be.
    """
    plain = config if isinstance(config, Mapping) else _plain(config)
    try:
        _Fields.model_validate(plain)
    except ValidationError as error:
        raise AdapterError(f"{subject}: {explain(error, plain, _Fields)}") from None


def _plain(config: LoraConfig) -> dict[str, Any]:
    """Return the config as ``adapter_config.json`` holds it; PEFT turns its lists into sets."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: list(value) if isinstance(value, set) else value for name, value in values.items()}


def check_patterns(config: LoraConfig, adapted: Collection[str]) -> None:
    """Refuse a rank or alpha for a name that is not adapted: after a typo the default would be used silently.

    For configs written for this model. Files that PEFT saved may hold patterns for other models.

    Args:
        config: the config with the patterns.
        adapted: names that PEFT compares the patterns with.

    Raises:
        AdapterError: a pattern matches none of the names.
    """
    for field in ("rank_pattern", "alpha_pattern"):
        for key in getattr(config, field):
            if not any(get_pattern_key([key], name) == key for name in adapted):
                known = sorted({name.rpartition(".")[2] for name in adapted})
                raise AdapterError(
                    f"adapter config: {field} has '{key}', which matches nothing that is adapted"
                    f"{nearest(key, known)} (adapted are: {', '.join(known)})"
                )
