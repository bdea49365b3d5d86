# SPDX-License-Identifier: Apache-2.0
"""Mix words as ``splitmix.mix64`` does, and divide items among programs: shared by the kernels of this folder."""

from collections.abc import Sequence

import triton
import triton.language as tl

from megarl.checkpoint_engine.splitmix import FIRST, GAMMA, SECOND

_GAMMA, _FIRST, _SECOND = tl.constexpr(GAMMA), tl.constexpr(FIRST), tl.constexpr(SECOND)


@triton.jit
def mixed(key):
    """Return splitmix64 of each key (uint64), as int64 so that sums wrap."""
    z = key + tl.full([], _GAMMA, tl.uint64)
    z = (z ^ (z >> 30)) * tl.full([], _FIRST, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full([], _SECOND, tl.uint64)
    return (z ^ (z >> 31)).to(tl.int64, bitcast=True)


def program_table(sizes: Sequence[int], block: int) -> tuple[list[int], list[int]]:
    """Cut items into blocks: for each program the item's index, and the index of its block in the item."""
    items: list[int] = []
    blocks: list[int] = []
    for index, size in enumerate(sizes):
        count = triton.cdiv(size, block)
        items += [index] * count
        blocks += range(count)
    return items, blocks
