# SPDX-License-Identifier: Apache-2.0
"""SwiGLU between two adapted linears: it adds the first one's update and projects for the second one's adapter.

The update of gate and up (``updates``) is added as they are read, forward and backward. The backward kernel also adds
the gradient that comes through the second linear's A. So neither product moves a wide activation through memory again.

Shape letters: T tokens, I features of the gate on this rank, S rank of the second adapter.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from megarl import progress
from megarl.model.layers.kernels.low_rank import factors_of, low_rank_tile, rank_block
from megarl.model.layers.kernels.rows import as_rows
from megarl.model.layers.kernels.swiglu import empty_result, slopes
from megarl.model.layers.updates import Update, flattened, update_gradients

# Tile of one program.
ROWS, COLUMNS, WARPS = 16, 128, 4


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
    out, projected = _AdaptedSwiGLU.apply(fused, matrix, *flattened(update, 2))
    return out, None if matrix is None else projected


class _AdaptedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fused: torch.Tensor, matrix: Any, low: Any, places: Any, *matrices: Any) -> Any:
        progress.made()
        out = empty_result(fused)
        _launch(_forward, fused, _products(fused, low, places, matrices), out)
        ctx.save_for_backward(fused, matrix, None if matrix is None else out, low, *matrices)
        ctx.places = places
        return out, out.new_empty(0) if matrix is None else F.linear(out, matrix)

    @staticmethod
    def backward(ctx: Any, by_out: torch.Tensor, by_projected: torch.Tensor) -> Any:
        progress.made()
        fused, matrix, out, low, *matrices = ctx.saved_tensors
        by_fused = torch.empty_like(fused, memory_format=torch.contiguous_format)
        behind = factors_of(by_projected, matrix, (0, 1.0), fused, along=0)
        _launch(_backward, fused, [*_products(fused, low, ctx.places, matrices), behind], by_out, by_fused)
        by_matrix = None
        if matrix is not None and ctx.needs_input_grad[1]:
            by_matrix = as_rows(by_projected).t() @ as_rows(out)
        by_low, *by_matrices = update_gradients(by_fused, low, ctx.places, matrices)
        return by_fused, by_matrix, by_low, None, *by_matrices


def _products(fused: torch.Tensor, low: Any, places: Any, matrices: Any) -> list[Any]:
    return [factors_of(low, matrix, place, fused) for place, matrix in zip(places, matrices, strict=True)]


def _launch(kernel: Any, fused: torch.Tensor, products: Any, narrow: torch.Tensor, *others: torch.Tensor) -> None:
    rows, narrow = as_rows(fused), as_rows(narrow)
    (tokens, width), ranks = narrow.shape, [rank for _, rank in products]
    sizes = {"RANKS": tuple(ranks), "BLOCKS": tuple(map(rank_block, ranks)), "WIDTH": width}
    tile = {"ROWS": ROWS, "COLUMNS": COLUMNS, "num_warps": WARPS}
    kernel[(triton.cdiv(tokens, ROWS), triton.cdiv(width, COLUMNS))](
        rows, narrow, *others, tokens, rows.stride(0), narrow.stride(0), *(tuple(one) for one, _ in products),
        **sizes, **tile,
    )  # fmt: skip


@triton.jit
def _forward(
    fused, out, tokens, fused_stride, stride, of_gate, of_up, RANKS: tl.constexpr, BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column, inside = _locate(tokens, WIDTH, ROWS, COLUMNS)
    place = fused + row[:, None] * fused_stride + column[None, :]
    gate = _updated(place, of_gate, row, column, inside, tokens, WIDTH, RANKS[0], BLOCKS[0])
    up = _updated(place + WIDTH, of_up, row, column, inside, tokens, WIDTH, RANKS[1], BLOCKS[1])
    active = gate * tl.sigmoid(gate) * up
    tl.store(out + row[:, None] * stride + column[None, :], active.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    fused, by_out, by_fused, tokens, fused_stride, stride, of_gate, of_up, behind, RANKS: tl.constexpr,
    BLOCKS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column, inside = _locate(tokens, WIDTH, ROWS, COLUMNS)
    place = fused + row[:, None] * fused_stride + column[None, :]
    slope = tl.load(by_out + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if RANKS[2] > 0:
        slope += low_rank_tile(
            behind[0], behind[1], behind[2], behind[3], row, column, tokens, WIDTH, WIDTH, 1, RANKS[2], BLOCKS[2]
        )
    gate = _updated(place, of_gate, row, column, inside, tokens, WIDTH, RANKS[0], BLOCKS[0])
    up = _updated(place + WIDTH, of_up, row, column, inside, tokens, WIDTH, RANKS[1], BLOCKS[1])
    by_gate, by_up = slopes(slope, gate, up)
    target = by_fused + row[:, None] * 2 * WIDTH + column[None, :]
    tl.store(target, by_gate.to(by_fused.dtype.element_ty), mask=inside)
    tl.store(target + WIDTH, by_up.to(by_fused.dtype.element_ty), mask=inside)


@triton.jit
def _locate(tokens, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return this program's rows and columns, and which of them exist."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    return row, column, (row < tokens)[:, None] & (column < WIDTH)[None, :]


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
