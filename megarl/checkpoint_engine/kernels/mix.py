# SPDX-License-Identifier: Apache-2.0
"""Mix words as ``splitmix.mix64`` does: shared by the kernels of this folder."""

import triton
import triton.language as tl

from megarl.checkpoint_engine.buckets.splitmix import FIRST, GAMMA, SECOND

_GAMMA, _FIRST, _SECOND = tl.constexpr(GAMMA), tl.constexpr(FIRST), tl.constexpr(SECOND)


@triton.jit
def mixed(word, position):
    """Return what each word (int64) at its position adds to a digest, as int64 so that sums wrap."""
    gamma = tl.full([], _GAMMA, tl.uint64)
    z = word.to(tl.uint64, bitcast=True) + (position.to(tl.uint64) + 1) * gamma
    z = (z ^ (z >> 30)) * tl.full([], _FIRST, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full([], _SECOND, tl.uint64)
    return (z ^ (z >> 31)).to(tl.int64, bitcast=True)
