# SPDX-License-Identifier: Apache-2.0
"""Share tokens among programs that each add up theirs, and add up what those found.

So sums over tokens have a fixed order: a second run gives the same bits.
"""

import torch
import triton
import triton.language as tl

from megarl.triton_support import ceil_div
from megarl.triton_support.quick_launch import QuickKernel

# Tile of a step of one program, and where few programs have found something.
ROWS, COLUMNS, WARPS = 32, 128, 4
FEW_ROWS, FEW_WARPS = 8, 2


def share_tokens(tokens: int, programs: int, tile: int) -> tuple[int, int]:
    """Return how many tokens one program takes, in whole tiles, and the number of programs: about ``programs``."""
    own = ceil_div(ceil_div(tokens, max(1, programs)), tile) * tile
    return own, ceil_div(tokens, own)


def sum_chunks(found: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the sum over programs of ``found [programs, N]`` float32, contiguous, rounded once: ``[N]``."""
    count, width = found.shape
    out = found.new_empty(width, dtype=dtype)
    rows, warps = (FEW_ROWS, FEW_WARPS) if count <= FEW_ROWS else (ROWS, WARPS)
    if width:
        _sum[(ceil_div(width, COLUMNS),)](found, out, count, width, ROWS=rows, COLUMNS=COLUMNS, num_warps=warps)
    return out


@QuickKernel
@triton.jit
def _sum(found, out, count, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    sum_columns(found, out, tl.program_id(0), count, width, ROWS, COLUMNS)


@triton.jit
def sum_columns(found, out, block, count, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Add up ``COLUMNS`` columns of ``found [count, width]``, the ``block``-th so many; see ``sum_chunks``."""
    column = block.to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, count, ROWS):
        row = (begin + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < count)[:, None] & inside[None, :]
        sums += tl.load(found + row[:, None] * width + column[None, :], mask=mask, other=0.0)
    tl.store(out + column, tl.sum(sums, 0).to(out.dtype.element_ty), mask=inside)
