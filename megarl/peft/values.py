# SPDX-License-Identifier: Apache-2.0
"""Values of a PEFT config that PEFT takes as they come, and that mean nothing or not what they say.

PEFT checks none of them when it reads a file: ``use_rslora: "no"`` would be true, an alpha of 0 no adapter at all.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from peft import LoraConfig
from peft.utils.other import get_pattern_key
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megarl.config.explain import explain
from megarl.config.lora import Pattern
from megarl.errors import AdapterError, nearest

Rank = Annotated[int, Field(ge=1, le=2**20)]
# Python's integers have no largest one; JSON's 1e400 is read as infinity.
Alpha = Annotated[float, Field(gt=0.0, le=2.0**53, allow_inf_nan=False)]
Modules = Pattern | list[str] | None


class _Fields(BaseModel):
    """Types and ranges of the fields that decide what an adapter computes, or on which PEFT fails."""

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


def check_values(config: LoraConfig | Mapping[str, Any], where: str = "adapter config") -> None:
    """Refuse values of another type or range than their fields'.

    Args:
        config: PEFT's, or what ``adapter_config.json`` holds.
        where: what the message starts with.

    Raises:
        AdapterError: one line for each wrong field: its name, its value and what it must be.
    """
    plain = config if isinstance(config, Mapping) else _plain(config)
    try:
        _Fields.model_validate(plain)
    except ValidationError as error:
        raise AdapterError(f"{where}: {explain(error, plain, _Fields)}") from None


def _plain(config: LoraConfig) -> dict[str, Any]:
    """As ``adapter_config.json`` has it: PEFT makes sets of its lists."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: list(value) if isinstance(value, set) else value for name, value in values.items()}


def check_patterns(config: LoraConfig, adapted: Collection[str]) -> None:
    """Refuse a rank or alpha for a name that is not adapted: a typo would leave the default in its place.

    For a config that somebody wrote for this model. PEFT's files may hold patterns for what other models have.

    Args:
        config: the patterns.
        adapted: the names that PEFT compares them with.

    Raises:
        AdapterError: a pattern that matches none of them.
    """
    for field in ("rank_pattern", "alpha_pattern"):
        for key in getattr(config, field):
            if not any(get_pattern_key([key], name) == key for name in adapted):
                known = sorted({name.rpartition(".")[2] for name in adapted})
                raise AdapterError(
                    f"adapter config: {field} has '{key}', which matches nothing that is adapted"
                    f"{nearest(key, known)} (adapted are: {', '.join(known)})"
                )
