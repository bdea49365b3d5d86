# SPDX-License-Identifier: Apache-2.0
"""Add a linear's output and its adapter's update to the residual stream, by one Triton kernel.

Shape letters: T tokens, H hidden size, R rank.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from megarl import progress
from megarl.model.layers.kernels.low_rank import factors_of, low_rank_tile, rank_block
from megarl.model.layers.kernels.rows import as_rows
from megarl.model.layers.updates import Update, flattened, update_gradients
from megarl.triton_support import ceil_div
from megarl.triton_support.quick_launch import QuickKernel

# Tile of one program.
ROWS, COLUMNS, WARPS = 32, 128, 4


def add_adapted(residual: torch.Tensor, out: torch.Tensor, update: Update) -> torch.Tensor:
    """Return ``residual + out + update``, added in float32 and rounded once.

    Args:
        residual, out: ``[..., H]``, 16-bit.
        update: what is to be added to ``out``.
    """
    return AddAdapted.apply(residual, out, *flattened(update, 1))


class AddAdapted(torch.autograd.Function):
    """``add_adapted`` as autograd takes it, its update ``flattened``."""

    @staticmethod
    def forward(
        ctx: Any, residual: torch.Tensor, out: torch.Tensor, low: torch.Tensor, places: Any, matrix: torch.Tensor
    ) -> torch.Tensor:
        """Compute ``add_adapted``; keep ``low [..., R]`` and B alone."""
        progress.made()
        total = torch.empty_like(residual, memory_format=torch.contiguous_format)
        ctx.save_for_backward(low, matrix)
        ctx.places = places
        stream, rows = as_rows(residual), as_rows(out)
        (tokens, width), (factors, rank) = rows.shape, factors_of(low, matrix, places[0], rows)
        _add[(ceil_div(tokens, ROWS), ceil_div(width, COLUMNS))](
            stream, rows, total, tokens, stream.stride(0), rows.stride(0), *factors, WIDTH=width, RANK=rank,
            BLOCK=rank_block(rank), ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS,
        )  # fmt: skip
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        progress.made()
        low, matrix = ctx.saved_tensors
        by_low, by_matrix = update_gradients(gradient, low, ctx.places, [matrix])
        return gradient, gradient, by_low, None, by_matrix


@QuickKernel
@triton.jit
def _add(
    residual, out, total, tokens, residual_stride, stride, low, matrix, scale, low_stride, WIDTH: tl.constexpr,
    RANK: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < tokens)[:, None] & (column < WIDTH)[None, :]
    states = tl.load(residual + row[:, None] * residual_stride + column[None, :], mask=inside, other=0.0)
    added = tl.load(out + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    added += low_rank_tile(low, matrix, scale, low_stride, row, column, tokens, WIDTH, 1, RANK, RANK, BLOCK)
    summed = (states.to(tl.float32) + added).to(total.dtype.element_ty)
    tl.store(total + row[:, None] * WIDTH + column[None, :], summed, mask=inside)
