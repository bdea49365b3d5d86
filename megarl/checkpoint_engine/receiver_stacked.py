# SPDX-License-Identifier: Apache-2.0
"""Adapters of stacked experts, as PEFT's ``target_parameters`` has them -> vLLM's pairs, one for each projection.

PEFT (0.21) keeps one pair for all E experts of a parameter: A ``[E * r, in]`` with one expert's rows after the other's,
B ``[out, r * E]`` of which expert e has every E-th column from e on. Gate and up are of one parameter and share A;
B has gate's rows before up's. vLLM (0.32) splits its 3D format in the same way (``_convert_3d_to_2d_moe_lora``), but
only in engines that were started for it; 0.26 has no such option.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from peft import LoraConfig

from megarl.checkpoint_engine.receiver_moe import PROJECTIONS, experts_of, shapes
from megarl.errors import WeightSyncError
from megarl.peft.names import DOWN, GATE_UP

# transformers 5's name of Mixtral's block, and vLLM's.
BLOCKS = (".mlp.", ".block_sparse_moe.")

Halves = Mapping[str, tuple[torch.Tensor, torch.Tensor]]


class Unstacked(NamedTuple):
    """An adapter, projection by projection.

    Attributes:
        halves: module -> (A, B).
        keys: module -> the parameter's name, by which PEFT's patterns match it.
        absent: projections that the adapter leaves alone, in layers where vLLM needs all or none.
    """

    halves: dict[str, tuple[torch.Tensor, torch.Tensor]]
    keys: dict[str, str]
    absent: dict[str, tuple[int, int]]


def unstack(inner: Any, halves: Halves, modules: Mapping[str, tuple[int, int]], config: LoraConfig) -> Unstacked:
    """Split what is stacked; everything else keeps its pair.

    Args:
        inner: vLLM's LoRA model manager.
        halves: PEFT's module -> (A, B), as they came.
        modules: what vLLM can adapt -> (input size, output size).
        config: with ``target_parameters``.

    Raises:
        WeightSyncError: a pair that is missing, or that the experts cannot share.
    """
    left = {_known(name, modules): pair for name, pair in halves.items()}
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
                left |= _split(wrapper, left, members, module.local_num_experts)
            elif adapted:
                absent |= {part: shapes(module, parts)[part] for part in members}
    return Unstacked(left, {name: key for name, key in keys.items() if _targeted(key, config)}, absent)


def _split(
    name: str, left: dict[str, tuple[torch.Tensor, torch.Tensor]], members: list[str], experts: int
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Take a stacked pair out of ``left``; member -> its pair."""
    if name not in left:
        raise WeightSyncError(f"adapter_config.target_parameters covers '{name}', but no tensor of it came")
    a, b = left.pop(name)
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
    """PEFT's matching of ``target_parameters``."""
    return any(f".{key}".endswith(f".{target}") for target in config.target_parameters or ())


def _in_transformers(name: str) -> str:
    return name.replace(BLOCKS[1], BLOCKS[0])


def _known(name: str, modules: Mapping[str, Any]) -> str:
    """A module's name in vLLM."""
    other = name.replace(BLOCKS[0], BLOCKS[1])
    return other if name not in modules and other in modules else name
