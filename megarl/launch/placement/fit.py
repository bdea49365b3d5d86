# SPDX-License-Identifier: Apache-2.0
"""Fit blocks of trainer ranks, and engines, into nodes."""

from collections.abc import Sequence
from math import lcm

from megarl.config import ParallelConfig


def block_sizes(parallel: ParallelConfig) -> list[int]:
    """Return the sizes of blocks of consecutive ranks to keep inside a node, best first; the last one is mandatory.

    The last size holds a tensor parallel group and an expert-tensor parallel one. The sizes before it also hold the
    context parallel and expert parallel groups, or one of the two.
    """
    tensor, context = parallel.tensor, parallel.context
    expert, expert_tensor = parallel.expert, parallel.expert_tensor
    sizes = [
        lcm(tensor * context, expert_tensor * expert),
        lcm(tensor * context, expert_tensor),
        lcm(tensor, expert_tensor * expert),
        lcm(tensor, expert_tensor),
    ]
    return list(dict.fromkeys(sizes))


def fit(
    slots: Sequence[int], block: int, blocks: int, width: int, engines: int, on_first: int = 0
) -> tuple[list[int], list[int]] | None:
    """Fill nodes in order with as many blocks of ranks as leave room for all engines, then with engines.

    Exact: returns None only if nothing fits.

    Args:
        slots: number of free slots on each node.
        block, blocks: slots per block, and number of blocks.
        width, engines: slots per engine, and number of engines.
        on_first: least number of blocks on the first node.

    Returns:
        Blocks per node and engines per node.
    """
    count = len(slots)
    # most[n][b]: the most engines that nodes n and following can hold beside b blocks; -1 if they cannot hold the
    # blocks.
    most = [[-1] * (blocks + 1) for _ in range(count + 1)]
    most[count][0] = 0
    for n in reversed(range(count)):
        for b in range(blocks + 1):
            options = [
                most[n + 1][b - here] + (slots[n] - here * block) // width
                for here in range(min(b, slots[n] // block) + 1)
                if most[n + 1][b - here] >= 0
            ]
            most[n][b] = max(options, default=-1)
    blocks_left, held, taken, room = blocks, 0, [], []
    for n in range(count):
        for here in reversed(range(0 if n else on_first, min(blocks_left, slots[n] // block) + 1)):
            beside = (slots[n] - here * block) // width
            rest = most[n + 1][blocks_left - here]
            if rest >= 0 and held + beside + rest >= engines:
                break
        else:
            return None
        taken.append(here)
        room.append(beside)
        blocks_left, held = blocks_left - here, held + beside
    placed: list[int] = []
    for beside in room:
        placed.append(min(beside, engines - sum(placed)))
    return taken, placed
