# SPDX-License-Identifier: Apache-2.0
"""Form the gradient of A; in the same pass add what comes through A to the gradient of a linear's input.

As products of their own the two read the input, and read and write its gradient, one after the other. Behind an RMSNorm
the kernel forms the input from the norm's, so that it need not be kept. Where the linear's own product takes in what
comes through A (``megarl.lora.layers.beside``), A's gradient is formed alone.

Shape letters: T tokens, I input features of the linear, R rows of A.
"""

import torch
import triton
import triton.language as tl

from megarl.model.layers.kernels.chunk_sums import share_tokens, sum_chunks
from megarl.model.layers.kernels.low_rank import low_rows, rank_block
from megarl.model.layers.kernels.rows import as_rows
from megarl.triton_support import ceil_div
from megarl.triton_support.quick_launch import QuickKernel

# Tile of a step of one program; it has fewer columns for high ranks.
ROWS, COLUMNS, WARPS = 64, 64, 4
# Stages of the pipeline of loads, up to how many rows of A, and for more.
STAGES, NARROW, FEWER_STAGES = 3, 32, 2
# Sums that a program has in its registers at most. Rows of A; each program reads their gradients for its tokens.
SUMS, MOST = 8192, 96
# Programs to launch: enough for every multiprocessor of a GPU to have several.
PROGRAMS = 528


def takes(rows: int) -> bool:
    """Return True if the kernel is worth it for so many rows of A."""
    return rows <= MOST


def through_gradients(
    by_hidden: torch.Tensor | None, by_low: torch.Tensor, hidden: torch.Tensor, matrix: torch.Tensor,
    norm: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return A's gradient, ``by_low.T @ hidden``; add ``by_low @ matrix`` to ``by_hidden``, in float32, rounded once.

    Args:
        by_hidden: ``[T, I]``, 16-bit, contiguous rows; overwritten. None to add nothing.
        by_low: ``[T, R]``.
        hidden: ``[..., I]``, T tokens.
        matrix: A, ``[R, I]``.
        norm: ``hidden`` times these, by rows (float32 ``[T]``) and by columns (``[I]``), is the linear's input.

    Returns:
        ``[R, I]``.
    """
    rows, narrow, (rank, width) = as_rows(hidden), as_rows(by_low), matrix.shape
    tokens, block = rows.shape[0], rank_block(rank)
    columns = min(COLUMNS, SUMS // block)
    across = ceil_div(width, columns)
    own, programs = share_tokens(tokens, PROGRAMS // across, ROWS)
    added = rows if by_hidden is None else by_hidden
    sums = rows.new_empty(programs, rank * width, dtype=torch.float32)
    _through[(programs, across)](
        added, narrow, rows, *(norm or (rows, rows)), matrix.contiguous(), sums, tokens, own, added.stride(0),
        narrow.stride(0), rows.stride(0), ADDS=by_hidden is not None, NORM=norm is not None, WIDTH=width, RANK=rank,
        BLOCK=block, ROWS=ROWS, COLUMNS=columns, num_warps=WARPS,
        num_stages=STAGES if rank <= NARROW else FEWER_STAGES,
    )  # fmt: skip
    return sum_chunks(sums, matrix.dtype).view(rank, width)


@QuickKernel
@triton.jit
def _through(
    by_hidden, by_low, hidden, inverse, weight, matrix, sums, tokens, own, by_stride, low_stride, stride,
    ADDS: tl.constexpr, NORM: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute some columns of ``own`` tokens, tile by tile."""
    column, k = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, BLOCK)
    across = column < WIDTH
    at, of_matrix = k[:, None] * WIDTH + column[None, :], (k < RANK)[:, None] & across[None, :]
    if ADDS:
        factor = tl.load(matrix + at, mask=of_matrix, other=0.0)
    by_matrix = tl.zeros((COLUMNS, BLOCK), tl.float32)
    begin = tl.program_id(0).to(tl.int64) * own
    for start in range(0, own, ROWS):
        row = begin + start + tl.arange(0, ROWS)
        inside = (row < tokens)[:, None] & across[None, :]
        tile = tl.load(hidden + row[:, None] * stride + column[None, :], mask=inside, other=0.0)
        low = low_rows(by_low, low_stride, row, k, tokens, RANK)
        if ADDS:
            place = by_hidden + row[:, None] * by_stride + column[None, :]
            slope = tl.load(place, mask=inside, other=0.0).to(tl.float32)
            slope = tl.dot(low, factor, slope, input_precision="ieee")
            tl.store(place, slope.to(by_hidden.dtype.element_ty), mask=inside)
        if NORM:
            # Not the tile: it lies in shared memory as the product wants it, and the columns' factors can wait.
            root = tl.load(inverse + row, mask=row < tokens, other=0.0)
            low = (low.to(tl.float32) * root[:, None]).to(low.dtype)
        by_matrix = tl.dot(tl.trans(tile), low, by_matrix, input_precision="ieee")
    if NORM:
        by_matrix *= tl.load(weight + column, mask=across, other=0.0).to(tl.float32)[:, None]
    tl.store(sums + tl.program_id(0).to(tl.int64) * RANK * WIDTH + at, tl.trans(by_matrix), mask=of_matrix)
