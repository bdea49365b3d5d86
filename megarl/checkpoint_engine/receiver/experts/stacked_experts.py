# SPDX-License-Identifier: Apache-2.0
"""Convert adapters of stacked experts (PEFT's ``target_parameters``) to vLLM's pairs, one for each projection.

PEFT (0.21) keeps one pair for all E experts of a parameter: A ``[E * r, in]``, with the rows of one expert after those
of the other, and B ``[out, r * E]``, in which expert e has the columns e, e + E, e + 2E, ... Gate and up are one
parameter and share A; B has gate's rows before up's. vLLM (0.32) splits its 3D format in the same way
(``_convert_3d_to_2d_moe_lora``), but only in engines that were started for it; 0.26 has no such option.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from peft import LoraConfig

from megarl.checkpoint_engine.receiver.experts.mixtures import PROJECTIONS, experts_of, shapes
from megarl.errors import WeightSyncError
from megarl.families.base import DOWN, GATE_UP

# transformers 5's name of Mixtral's block, and vLLM's.
BLOCKS = (".mlp.", ".block_sparse_moe.")

Halves = Mapping[str, tuple[torch.Tensor, torch.Tensor]]


class Unstacked(NamedTuple):
    """An adapter, projection by projection.

    Attributes:
        halves: module -> (A, B).
        keys: module -> the parameter's name, with which PEFT's patterns are compared.
        absent: projections that the adapter does not cover, in layers where vLLM needs all or none.
    """

    halves: dict[str, tuple[torch.Tensor, torch.Tensor]]
    keys: dict[str, str]
    absent: dict[str, tuple[int, int]]


def unstack(inner: Any, halves: Halves, modules: Mapping[str, tuple[int, int]], config: LoraConfig) -> Unstacked:
    """Split the stacked pairs. All other modules keep their pairs.

    Args:
        inner: vLLM's LoRA model manager.
        halves: PEFT's module -> (A, B), as received.
        modules: modules that vLLM can adapt -> (input size, output size).
        config: PEFT's config, with ``target_parameters``.

    Raises:
        WeightSyncError: a pair is missing, or the experts cannot share it.
    """
    remaining = {_known(name, modules): pair for name, pair in halves.items()}
    keys = {name: f"{_in_transformers(name)}.weight" for name in modules}
    absent: dict[str, tuple[int, int]] = {}
    for _, module, parts in experts_of(inner):
        experts = _in_transformers(parts[0].rpartition(".")[0].rpartition(".")[0])
        adapted = [leaf for leaf in (GATE_UP, DOWN) if _targeted(f"{experts}.{leaf}", config)]
        for leaf in (GATE_UP, DOWN):
            members = [p for number, p in enumerate(parts) if (PROJECTIONS[number % 3] == "down") == (leaf == DOWN)]
            keys |= dict.fromkeys(members, f"{experts}.{leaf}")
            if leaf in adapted:
                wrapper = f"{experts}.base_layer" if leaf == GATE_UP and DOWN in adapted else experts
                remaining |= _split(wrapper, remaining, members, module.local_num_experts)
            elif adapted:
                absent |= {part: shapes(module, parts)[part] for part in members}
    return Unstacked(remaining, {name: key for name, key in keys.items() if _targeted(key, config)}, absent)


def _split(
    name: str, remaining: dict[str, tuple[torch.Tensor, torch.Tensor]], members: list[str], experts: int
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Remove a stacked pair from ``remaining`` and return each member's pair."""
    if name not in remaining:
        raise WeightSyncError(f"adapter_config.target_parameters covers '{name}', but no tensor of it came")
    a, b = remaining.pop(name)
    parts = len(members) // experts
    if a.shape[0] % experts or b.shape[1] % experts or b.shape[0] % parts:
        raise WeightSyncError(
            f"'{name}' has A {list(a.shape)} and B {list(b.shape)}, which {experts} experts cannot share"
        )
    rank, rows = a.shape[0] // experts, b.shape[0] // parts
    return {
        member: (
            a[(number // parts) * rank : (number // parts + 1) * rank],
            b[(number % parts) * rows : (number % parts + 1) * rows, number // parts :: experts],
        )
        for number, member in enumerate(members)
    }


def _targeted(key: str, config: LoraConfig) -> bool:
    """Match by PEFT's rule for ``target_parameters``."""
    return any(f".{key}".endswith(f".{target}") for target in config.target_parameters or ())


def _in_transformers(name: str) -> str:
    return name.replace(BLOCKS[1], BLOCKS[0])


def _known(name: str, modules: Mapping[str, Any]) -> str:
    """Return a module's name in vLLM."""
    other = name.replace(BLOCKS[0], BLOCKS[1])
    return other if name not in modules and other in modules else name
