"""Values of a PEFT config that PEFT takes as they come, and that mean nothing or not what they say."""

import math
import re
from collections.abc import Collection
from typing import Any

from peft import LoraConfig
from peft.utils.other import get_pattern_key

from megarl.errors import AdapterError, nearest


def check_values(config: LoraConfig) -> None:
    """Refuse values of another type or range than their fields'; ``"no"`` would count as true.

    Raises:
        AdapterError: naming the field, its value and what it must be.
    """
    dropout = config.lora_dropout
    if not (_is_number(dropout) and 0.0 <= dropout < 1.0):
        raise AdapterError(f"adapter config: lora_dropout is {dropout!r}; it must be a number from 0 to below 1")
    for field in ("use_rslora", "use_dora", "fan_in_fan_out", "lora_bias", "inference_mode"):
        if not isinstance(value := getattr(config, field), bool):
            raise AdapterError(f"adapter config: {field} is {value!r}; it must be true or false")
    for field in ("rank_pattern", "alpha_pattern"):
        if not isinstance(pattern := getattr(config, field), dict):
            raise AdapterError(f"adapter config: {field} is {pattern!r}; it must be an object of names and numbers")
        for key in pattern:
            _check_expression(field, key)
    for where, rank in {"r": config.r, **_entries(config, "rank_pattern")}.items():
        if type(rank) is not int or rank < 1:
            raise AdapterError(f"adapter config: {where} is {rank!r}; it must be a whole number above 0")
    for where, alpha in {"lora_alpha": config.lora_alpha, **_entries(config, "alpha_pattern")}.items():
        if not (_is_number(alpha) and 0.0 < alpha < math.inf):
            raise AdapterError(f"adapter config: {where} is {alpha!r}; it must be a number above 0")


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


def _entries(config: LoraConfig, field: str) -> dict[str, Any]:
    return {f"{field} of '{key}'": value for key, value in getattr(config, field).items()}


def _check_expression(field: str, key: Any) -> None:
    try:
        re.compile(key)
    except (re.error, TypeError, OverflowError, RecursionError) as error:
        raise AdapterError(f"adapter config: {field} has {key!r}, which is no regular expression: {error}") from error


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
