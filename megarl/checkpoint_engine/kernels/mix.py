# SPDX-License-Identifier: Apache-2.0
"""Mix words as ``splitmix.mix64`` does, and divide items among programs: shared by the kernels of this folder."""

from collections.abc import Sequence

import numpy as np
import triton
import triton.language as tl

from megarl.checkpoint_engine.splitmix import FIRST, GAMMA, SECOND

_GAMMA, _FIRST, _SECOND = tl.constexpr(GAMMA), tl.constexpr(FIRST), tl.constexpr(SECOND)


@triton.jit
def mixed(word, position):
    """Return what each word (int64) at its position adds to a digest, as int64 so that sums wrap."""
    gamma = tl.full([], _GAMMA, tl.uint64)
    z = word.to(tl.uint64, bitcast=True) + (position.to(tl.uint64) + 1) * gamma
    z = (z ^ (z >> 30)) * tl.full([], _FIRST, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full([], _SECOND, tl.uint64)
    return (z ^ (z >> 31)).to(tl.int64, bitcast=True)


def program_table(sizes: Sequence[int], block: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut items into blocks.

    Returns:
        For each program the index of its item, and the index of its block in the item; int64 ``[programs]``.
    """
    counts = -(-np.asarray(sizes, dtype=np.int64) // block)
    items: np.ndarray = np.repeat(np.arange(len(counts)), counts)
    return items, np.arange(len(items)) - np.repeat(np.cumsum(counts) - counts, counts)
