# SPDX-License-Identifier: Apache-2.0
"""Add up a few rows of a matrix for each token, in float32, by one Triton kernel.

Shape letters: T tokens, K rows of each, N rows of the matrix, H its width.
"""

import torch
import triton
import triton.language as tl

from megarl.model.layers.kernels.rows import as_rows
from megarl.triton_support import ceil_div
from megarl.triton_support.quick_launch import QuickKernel

COLUMNS, WARPS = 1024, 4


def sum_rows(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return for each token the sum of its rows, added up in order and rounded once.

    Args:
        rows: ``[N, H]``.
        places: int64 ``[T, K]``, contiguous: which rows are a token's.

    Returns:
        ``[T, H]``.
    """
    rows, tokens, width = as_rows(rows), len(places), rows.shape[1]
    out = rows.new_empty(tokens, width)
    if tokens:
        grid = (tokens, ceil_div(width, COLUMNS))
        _sum_rows[grid](
            rows, places, out, rows.stride(0), WIDTH=width, COUNT=places.shape[1], COLUMNS=COLUMNS, num_warps=WARPS
        )
    return out


@QuickKernel
@triton.jit
def _sum_rows(rows, places, out, stride, WIDTH: tl.constexpr, COUNT: tl.constexpr, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    total = tl.zeros((COLUMNS,), tl.float32)
    for index in range(COUNT):
        row = tl.load(places + token * COUNT + index)
        total += tl.load(rows + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + column, total.to(out.dtype.element_ty), mask=inside)
