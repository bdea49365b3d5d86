# SPDX-License-Identifier: Apache-2.0
"""Add a linear's output and its adapter's update to the residual stream, and normalise the sum, by one Triton kernel.

What lies behind the norm is an adapted linear too (``adapted_norm``). As kernels of their own (``residual``, ``norm``)
the two write the sum and read it again.

Shape letters: T tokens, H hidden size, r rank of the update, R rows of A.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from megarl import progress
from megarl.model.layers.kernels.adapted_norm import norm_gradients
from megarl.model.layers.kernels.low_rank import factors_of, low_rank_product, low_rows, rank_block
from megarl.model.layers.kernels.rows import as_rows
from megarl.model.layers.updates import Update, flattened, update_gradients

# Tokens of one program, columns of a step of it.
ROWS, COLUMNS, WARPS = 16, 256, 4


def add_and_norm(
    residual: torch.Tensor, out: torch.Tensor, update: Update, weight: torch.Tensor, eps: float, matrix: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what ``rms_norm_projected`` does for ``residual + out + update``, added in float32 and rounded once.

    Args:
        residual, out: ``[..., H]``, 16-bit.
        update: what is to be added to ``out``.
        weight, eps, matrix: see ``adapted_norm.rms_norm_projected``.
    """
    return _AddAndNorm.apply(residual, out, weight, eps, matrix, *flattened(update, 1))


class _AddAndNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, residual: torch.Tensor, out: torch.Tensor, weight: torch.Tensor, eps: float, matrix: torch.Tensor,
        low: torch.Tensor, places: Any, added: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """Compute ``add_and_norm``; keep the sum, and the rows of both adapters."""
        progress.made()
        total, normed = (torch.empty_like(residual, memory_format=torch.contiguous_format) for _ in range(2))
        stream, rows = as_rows(residual), as_rows(out)
        (tokens, width), (factors, rank) = rows.shape, factors_of(low, added, places[0], rows)
        inverse = rows.new_empty(tokens, dtype=torch.float32)
        _add_norm[(triton.cdiv(tokens, ROWS),)](
            stream, rows, total, normed, inverse, weight, eps, tokens, stream.stride(0), rows.stride(0), *factors,
            WIDTH=width, RANK=rank, BLOCK=rank_block(rank), ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS,
        )  # fmt: skip
        projected = F.linear(normed, matrix)
        ctx.save_for_backward(total, weight, inverse, matrix, projected, low, added)
        ctx.places = places
        return normed, projected, total

    @staticmethod
    def backward(ctx: Any, by_normed: torch.Tensor, by_projected: torch.Tensor, beside: torch.Tensor) -> Any:
        progress.made()
        *of_norm, low, added = ctx.saved_tensors
        by_total, by_matrix = norm_gradients(by_normed, by_projected, beside, *of_norm)
        by_low, by_added = update_gradients(by_total, low, ctx.places, [added])
        return by_total, by_total, None, None, by_matrix, by_low, None, by_added


@triton.jit
def _add_norm(
    residual, out, total, normed, inverse, weight, eps, tokens, residual_stride, stride, low, matrix, scale,
    low_stride, WIDTH: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add up the columns of some tokens, step by step; then read the sums again, and normalise them."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = row < tokens
    left = low_rows(low, low_stride, row, tl.arange(0, BLOCK), tokens, RANK)
    squares = tl.zeros((ROWS,), tl.float32)
    for start in range(0, WIDTH, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = there[:, None] & (column < WIDTH)[None, :]
        states = tl.load(residual + row[:, None] * residual_stride + column[None, :], mask=inside, other=0.0)
        added = tl.load(out + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        added += low_rank_product(left, matrix, scale, column, WIDTH, 1, RANK, RANK, BLOCK)
        summed = (states.to(tl.float32) + added).to(total.dtype.element_ty)
        tl.store(total + row[:, None] * WIDTH + column[None, :], summed, mask=inside)
        squares += tl.sum(summed.to(tl.float32) * summed.to(tl.float32), 1)
    root = tl.rsqrt(squares / WIDTH + eps)
    tl.store(inverse + row, root, mask=there)
    tl.debug_barrier()  # what other threads of the program have stored is read now
    for start in range(0, WIDTH, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = there[:, None] & (column < WIDTH)[None, :]
        values = tl.load(total + row[:, None] * WIDTH + column[None, :], mask=inside, other=0.0).to(tl.float32)
        gain = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        result = (values * root[:, None] * gain[None, :]).to(normed.dtype.element_ty)
        tl.store(normed + row[:, None] * WIDTH + column[None, :], result, mask=inside)
