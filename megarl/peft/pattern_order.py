# SPDX-License-Identifier: Apache-2.0
"""The order of ``rank_pattern`` that PEFT lost when it saved: of several keys that fit a module the first one wins, but
PEFT sorts them in the file, and then refuses its own file where another one wins. The ranks of the file's matrices say
which order it was."""

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
    """The config with ``rank_pattern`` in an order that gives every module its rank, if the file's order does not.

    Args:
        config: as the file has it.
        ranks: module -> rows of its A in the file; of unstacked modules.
        file: for messages.

    Raises:
        AdapterError: ``alpha_pattern`` has keys that overlap too, whose order nothing tells.
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
        return config  # the shapes are refused by name
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
