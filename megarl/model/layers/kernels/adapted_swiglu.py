# SPDX-License-Identifier: Apache-2.0
"""SwiGLU between two adapted linears: it adds the first one's update and projects for the second one's adapter.

The update of gate and up (``updates``) is added as they are read, forward and backward. The forward kernel multiplies
its tiles by the second linear's A, if that has a low rank. The backward kernel also adds the gradient that comes
through the second linear's A, and forms the gradients of the first one's B and of that A while it has the tiles. So
none of these products moves a wide activation through memory again, and the result of SwiGLU need not be kept.

Shape letters: T tokens, I features of the gate on this rank, S rank of the second adapter.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from megarl import progress
from megarl.model.layers.kernels.chunk_sums import share_tokens, sum_chunks
from megarl.model.layers.kernels.low_rank import LEAST, factors_of, low_rank_tile, matrix_columns, rank_block
from megarl.model.layers.kernels.rows import as_rows
from megarl.model.layers.kernels.swiglu import empty_result, slopes
from megarl.model.layers.updates import Update, flattened, low_gradient, with_room
from megarl.triton_support import ceil_div
from megarl.triton_support.fast_math import sigmoid
from megarl.triton_support.quick_launch import QuickKernel

# Tile of a forward program; tile of a step of one that also projects, with a warp for 16 rows, as its products want it.
ROWS, COLUMNS, WARPS = 16, 128, 4
BOTH_ROWS, BOTH_COLUMNS, BOTH_WARPS, BOTH_STAGES = 32, 64, 2, 2
# Highest rank that the forward kernel projects to; programs to launch at least then.
MOST, BOTH_PROGRAMS = 32, 2048
# Tile of a step of a backward program, which has fewer columns for high ranks.
STEP_ROWS, STEP_COLUMNS, STEP_WARPS = 32, 64, 4
# Sums that a backward program has in its registers at most.
SUMS = 8192
# Backward programs to launch: enough for every multiprocessor of a GPU to have several.
PROGRAMS = 400


def adapted_swiglu(
    fused: torch.Tensor, update: Update | None, matrix: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute ``silu(gate) * up`` (Shazeer, arXiv:2002.05202) in float32, rounded once, and its product with A.

    Args:
        fused: ``[..., 2 I]``, 16-bit: gate, then up; without ``update``.
        update: what is to be added to gate and to up first; None for nothing.
        matrix: every A of the second linear, ``[S, I]``; None for no product.

    Returns:
        ``[..., I]``, and its product with ``matrix``, ``[..., S]``, or None. Pass the first to the second linear's base
        and nowhere else.
    """
    out, projected = AdaptedSwiGLU.apply(fused, matrix, *flattened(update, 2))
    return out, None if matrix is None else projected


class AdaptedSwiGLU(torch.autograd.Function):
    """``adapted_swiglu`` as autograd takes it, its update ``flattened``."""

    @staticmethod
    def forward(ctx: Any, fused: torch.Tensor, matrix: Any, low: Any, places: Any, *matrices: Any) -> Any:
        """Compute ``adapted_swiglu``; an empty tensor stands for no product with A."""
        progress.made()
        out, rows = empty_result(fused), as_rows(fused)
        products, narrow = _products(fused, low, places, matrices), as_rows(out)
        projected = _run_forward(rows, narrow, products, None if matrix is None else matrix.contiguous())
        ctx.save_for_backward(fused, matrix, low, *matrices)
        ctx.places = places
        return out, out.new_empty(0) if projected is None else projected.view(*out.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, by_out: torch.Tensor, by_projected: torch.Tensor) -> Any:
        """Return the gradients of ``fused [..., 2 I]``, A ``[S, I]``, low ``[..., R]`` and each B ``[I, r]``."""
        progress.made()
        fused, matrix, low, *matrices = ctx.saved_tensors
        behind = factors_of(by_projected, matrix, (0, 1.0), fused, along=0)
        products = [*_products(fused, low, ctx.places, matrices), behind]
        by_fused, narrow = with_room(fused, 0 if low is None else low.shape[-1])
        sums = _run_backward(fused, by_out, products, by_fused)
        width, ranks = by_out.shape[-1], [rank for _, rank in products]
        of_gate, of_up, of_behind = sums.split_with_sizes([width * rank for rank in ranks])
        by_b = (of.view(width, rank) if rank else None for of, rank in zip((of_gate, of_up), ranks, strict=False))
        by_a = None if matrix is None else of_behind.view(matrix.shape)
        by_low = None if low is None else low_gradient(by_fused, ctx.places, matrices, narrow)
        return by_fused, by_a, by_low, None, *by_b


def _products(fused: torch.Tensor, low: Any, places: Any, matrices: Any) -> list[Any]:
    return [factors_of(low, matrix, place, fused) for place, matrix in zip(places, matrices, strict=True)]


def _sizes(products: list[Any]) -> dict[str, tuple[int, ...]]:
    ranks = tuple(rank for _, rank in products)
    return {"RANKS": ranks, "BLOCKS": _blocks(ranks)}


@cache
def _blocks(ranks: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(rank_block, ranks))


def _run_forward(
    rows: torch.Tensor, out: torch.Tensor, products: list[Any], matrix: torch.Tensor | None
) -> torch.Tensor | None:
    """Write ``out [T, I]``; return its product with A, ``[T, S]``."""
    (tokens, width), rank = out.shape, 0 if matrix is None or matrix.shape[0] > MOST else matrix.shape[0]
    rows_of, columns, warps = (BOTH_ROWS, BOTH_COLUMNS, BOTH_WARPS) if rank else (ROWS, COLUMNS, WARPS)
    down, across = ceil_div(tokens, rows_of), ceil_div(width, columns)
    # Programs that project share the columns, and what they find is added up. Others have one tile.
    own = ceil_div(across, min(across, ceil_div(BOTH_PROGRAMS, down)) if rank else across) * columns
    found = rows.new_empty(ceil_div(width, own) if rank else 0, tokens * rank, dtype=torch.float32)
    _forward[(down, ceil_div(width, own))](
        rows, out, out if matrix is None else matrix, found, tokens, rows.stride(0), out.stride(0),
        *(tuple(one) for one, _ in products), **_sizes(products), WIDTH=width, OWN=own, RANK=rank,
        BLOCK=rank_block(rank), ROWS=rows_of, COLUMNS=columns, num_warps=warps, num_stages=BOTH_STAGES,
    )  # fmt: skip
    if rank:
        return sum_chunks(found, out.dtype).view(tokens, rank)
    return None if matrix is None else F.linear(out, matrix)


def _run_backward(
    fused: torch.Tensor, by_out: torch.Tensor, products: list[Any], by_fused: torch.Tensor
) -> torch.Tensor:
    """Write the gradient of ``fused``; return those of the products' matrices one after the other, flat."""
    rows, by_rows = as_rows(fused), as_rows(by_out)
    (tokens, width), sizes = by_rows.shape, _sizes(products)
    columns = STEP_COLUMNS
    while columns > LEAST and sum(sizes["BLOCKS"]) * columns > SUMS:
        columns //= 2
    across = ceil_div(width, columns)
    own, chunks = share_tokens(tokens, PROGRAMS // across, STEP_ROWS)
    sums = rows.new_empty(chunks, sum(sizes["RANKS"]) * width, dtype=torch.float32)
    _backward[(chunks, across)](
        rows, by_rows, by_fused, sums, tokens, own, rows.stride(0), by_rows.stride(0), as_rows(by_fused).stride(0),
        *(tuple(one) for one, _ in products), **sizes, WIDTH=width, ROWS=STEP_ROWS, COLUMNS=columns,
        num_warps=STEP_WARPS,
    )  # fmt: skip
    return sum_chunks(sums, fused.dtype)


@QuickKernel
@triton.jit
def _forward(
    fused, out, matrix, found, tokens, fused_stride, stride, of_gate, of_up, RANKS: tl.constexpr, BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr, OWN: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute ``OWN`` columns of some tokens, and their product with A."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1).to(tl.int64) * OWN
    product = _zeros(BLOCK, ROWS)
    for start in range(0, OWN, COLUMNS):
        column = first + start + tl.arange(0, COLUMNS)
        inside = (row < tokens)[:, None] & (column < WIDTH)[None, :]
        place = fused + row[:, None] * fused_stride + column[None, :]
        gate = _updated(place, of_gate, row, column, inside, tokens, WIDTH, RANKS[0], BLOCKS[0])
        up = _updated(place + WIDTH, of_up, row, column, inside, tokens, WIDTH, RANKS[1], BLOCKS[1])
        active = (gate * sigmoid(gate) * up).to(out.dtype.element_ty)
        tl.store(out + row[:, None] * stride + column[None, :], active, mask=inside)
        if RANK > 0:
            factor = matrix_columns(matrix, column, WIDTH, WIDTH, 1, RANK, BLOCK)
            # Transposed, so that the tile is the right factor. As the left one it would be held by every warp.
            product = tl.dot(factor, tl.trans(active), product, input_precision="ieee")
    found += tl.program_id(1).to(tl.int64) * tokens * RANK
    _store(found, product, 1.0, row, tokens, 1, RANK, RANK, BLOCK)


@QuickKernel
@triton.jit
def _backward(
    fused, by_out, by_fused, sums, tokens, own, fused_stride, stride, by_stride, of_gate, of_up, behind,
    RANKS: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute some columns of ``own`` tokens, tile by tile."""
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(0).to(tl.int64) * own
    by_gates, by_ups = _zeros(BLOCKS[0], COLUMNS), _zeros(BLOCKS[1], COLUMNS)
    by_behind = _zeros(BLOCKS[2], COLUMNS)
    for start in range(0, own, ROWS):
        row = first + start + tl.arange(0, ROWS)
        inside = (row < tokens)[:, None] & (column < WIDTH)[None, :]
        slope = tl.load(by_out + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        if RANKS[2] > 0:
            slope += low_rank_tile(
                behind[0], behind[1], behind[2], behind[3], row, column, tokens, WIDTH, WIDTH, 1, RANKS[2], BLOCKS[2]
            )
        place = fused + row[:, None] * fused_stride + column[None, :]
        gate = _updated(place, of_gate, row, column, inside, tokens, WIDTH, RANKS[0], BLOCKS[0])
        up = _updated(place + WIDTH, of_up, row, column, inside, tokens, WIDTH, RANKS[1], BLOCKS[1])
        by_gate, by_up = slopes(slope, gate, up)
        by_gate, by_up = by_gate.to(by_fused.dtype.element_ty), by_up.to(by_fused.dtype.element_ty)
        target = by_fused + row[:, None] * by_stride + column[None, :]
        tl.store(target, by_gate, mask=inside)
        tl.store(target + WIDTH, by_up, mask=inside)
        by_gates = _summed(by_gates, of_gate, by_gate, row, tokens, RANKS[0], BLOCKS[0])
        by_ups = _summed(by_ups, of_up, by_up, row, tokens, RANKS[1], BLOCKS[1])
        if RANKS[2] > 0:
            active = (gate * sigmoid(gate) * up).to(by_fused.dtype.element_ty)
            by_behind = _summed(by_behind, behind, active, row, tokens, RANKS[2], BLOCKS[2])
    # This program's sums: those of its tokens.
    sums += tl.program_id(0).to(tl.int64) * (RANKS[0] + RANKS[1] + RANKS[2]) * WIDTH
    _store(sums, by_gates, of_gate[2], column, WIDTH, 1, RANKS[0], RANKS[0], BLOCKS[0])
    _store(sums + RANKS[0] * WIDTH, by_ups, of_up[2], column, WIDTH, 1, RANKS[1], RANKS[1], BLOCKS[1])
    sums += (RANKS[0] + RANKS[1]) * WIDTH
    _store(sums, by_behind, behind[2], column, WIDTH, WIDTH, 1, RANKS[2], BLOCKS[2])


@triton.jit
def _updated(
    place, factors, row, column, inside, tokens, WIDTH: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Return a tile of gate or up in float32, with its update."""
    values = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    if RANK > 0:
        values += low_rank_tile(
            factors[0], factors[1], factors[2], factors[3], row, column, tokens, WIDTH, 1, RANK, RANK, BLOCK
        )
    return values


@triton.jit
def _zeros(BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.zeros((BLOCK if BLOCK > 0 else 1, COLUMNS), tl.float32)


@triton.jit
def _summed(sums, factors, tile, row, tokens, RANK: tl.constexpr, BLOCK: tl.constexpr):
    """Return ``sums [BLOCK, columns]`` plus ``low[row].T @ tile``."""
    if RANK > 0:
        k = tl.arange(0, BLOCK)
        inside = (k < RANK)[:, None] & (row < tokens)[None, :]
        low = tl.load(factors[0] + row[None, :] * factors[3] + k[:, None], mask=inside, other=0.0)
        sums = tl.dot(low, tile, sums, input_precision="ieee")
    return sums


@triton.jit
def _store(
    out, sums, scale, column, width, rank_stride, column_stride, RANK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Store ``sums [BLOCK, columns]``, scaled; the strides are those of a rank's and of a column's elements."""
    if RANK > 0:
        k = tl.arange(0, BLOCK)
        place = out + k[:, None] * rank_stride + column[None, :] * column_stride
        tl.store(place, scale * sums, mask=(k < RANK)[:, None] & (column < width)[None, :])
