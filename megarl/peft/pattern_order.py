# SPDX-License-Identifier: Apache-2.0
"""Restore the order of ``rank_pattern`` that PEFT loses when it saves.

If several keys match a module, the first one wins. PEFT sorts the keys in the file, and then refuses its own file if
another key wins. The ranks of the file's matrices tell the original order.
"""

import dataclasses
import re
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any

from peft import LoraConfig
from peft.utils.other import get_pattern_key

from megarl.errors import AdapterError

SIDE_A = re.compile(r"base_model\.model\.(.+)\.lora_A\.weight")


def restore_order(config: LoraConfig, ranks: Mapping[str, int], file: Any) -> LoraConfig:
    """Return the config with ``rank_pattern`` in an order that gives every module its rank, if the file's does not.

    Args:
        config: the config as stored in the file.
        ranks: maps unstacked modules to the rows of their A in the file.
        file: names the file in messages.

    Raises:
        AdapterError: ``alpha_pattern`` has overlapping keys too, and nothing tells their order.
    """
    pattern = config.rank_pattern
    wrong = [name for name, rank in ranks.items() if _resolved(list(pattern), pattern, name, config.r) != rank]
    if len(pattern) < 2 or not wrong:
        return config
    after: dict[str, set[str]] = {key: set() for key in sorted(pattern)}
    for name, rank in ranks.items():
        fitting = [key for key in after if get_pattern_key([key], name) == key]
        winners = [key for key in fitting if pattern[key] == rank]
        if not winners:
            continue
        for key in fitting:
            if pattern[key] != rank:
                after[key].add(winners[0])
    try:
        order = list(TopologicalSorter(after).static_order())
    except CycleError:
        return config  # the caller refuses the shapes by name
    if any(_resolved(order, pattern, name, config.r) != rank for name, rank in ranks.items()):
        return config
    for name in ranks:
        alphas = {config.alpha_pattern[key] for key in config.alpha_pattern if get_pattern_key([key], name) == key}
        if len(alphas) > 1:
            raise AdapterError(
                f"{file}: several keys of alpha_pattern fit '{name}'; the first one won in training, but PEFT sorted "
                "them when it saved; replace them by keys of which only one fits a module"
            )
    return dataclasses.replace(config, rank_pattern={key: pattern[key] for key in order})


def _resolved(order: list[str], pattern: Mapping[str, int], name: str, default: int) -> int:
    return pattern.get(get_pattern_key(order, name), default)
