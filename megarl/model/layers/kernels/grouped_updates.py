# SPDX-License-Identifier: Apache-2.0
"""Add each expert's low-rank product to its tokens' rows, where they lie.

As a grouped product and a sum of their own the wide result is written, read again with what it is added to, and written
once more. The kernel reads and writes the rows once, adds in float32 and rounds once.

Shape letters: T tokens of all experts, sorted by expert; E experts; R rank; O features.
"""

import torch
import triton
import triton.language as tl

from megarl.model.layers.kernels.low_rank import low_rows, matrix_columns, rank_block
from megarl.triton_support import ceil_div, power_of_two
from megarl.triton_support.quick_launch import QuickKernel

# Tile of one program. Most tiles have tokens of one expert, or of two.
ROWS, COLUMNS, WARPS = 64, 128, 4
# Highest rank: a tile's rows of ``low`` are held for all of its experts.
MOST = 128
# A row that no expert's end is beyond.
NEVER = tl.constexpr(2**31 - 1)


def add_grouped(
    out: torch.Tensor, low: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor, scale: float, *, along: int
) -> None:
    """Add ``scale * low @ matrix`` of each token's expert to ``out``, in its memory.

    Args:
        out: ``[T, O]``, contiguous rows.
        low: ``[T, R]``, contiguous rows.
        matrices: B of each expert, ``[E, O, R]``, or A, ``[E, R, O]``; contiguous.
        ends: int32 ``[E]``, the row after the last one of each expert.
        scale: factor of the product.
        along: the rank's dimension of ``matrices``, 1 or 2.
    """
    (tokens, width), rank, experts = out.shape, low.shape[1], len(ends)
    strides = (width, 1) if along == 1 else (1, rank)
    if tokens:
        _add[(ceil_div(tokens, ROWS), ceil_div(width, COLUMNS))](
            out, low, matrices, ends, scale, tokens, out.stride(0), low.stride(0), *strides, WIDTH=width,
            EXPERTS=experts, HELD=power_of_two(experts), RANK=rank, BLOCK=rank_block(rank), ROWS=ROWS, COLUMNS=COLUMNS,
            num_warps=WARPS,
        )  # fmt: skip


@QuickKernel
@triton.jit
def _add(
    out, low, matrices, ends, scale, tokens, stride, low_stride, rank_stride, column_stride, WIDTH: tl.constexpr,
    EXPERTS: tl.constexpr, HELD: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0).to(tl.int64) * ROWS
    row = begin + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    # The experts of the first and of the last row: as many as have ended before.
    expert = tl.arange(0, HELD)
    ended = tl.load(ends + expert, mask=expert < EXPERTS, other=NEVER)
    first = tl.sum((ended <= begin).to(tl.int32), 0)
    last = tl.sum((ended <= tl.minimum(begin + ROWS, tokens) - 1).to(tl.int32), 0)
    left = low_rows(low, low_stride, row, tl.arange(0, BLOCK), tokens, RANK)
    added = tl.zeros((ROWS, COLUMNS), tl.float32)
    for one in range(first, tl.minimum(last, EXPERTS - 1) + 1):
        start = tl.load(ends + one - 1, mask=one > 0, other=0)
        own = ((row >= start) & (row < tl.load(ends + one)))[:, None]
        matrix = matrices + tl.cast(one, tl.int64) * WIDTH * RANK
        right = matrix_columns(matrix, column, WIDTH, rank_stride, column_stride, RANK, BLOCK)
        added = tl.dot(tl.where(own, left, 0.0).to(left.dtype), right, added, input_precision="ieee")
    place = out + row[:, None] * stride + column[None, :]
    inside = (row < tokens)[:, None] & (column < WIDTH)[None, :]
    total = tl.load(place, mask=inside, other=0.0).to(tl.float32) + scale * added
    tl.store(place, total.to(out.dtype.element_ty), mask=inside)
