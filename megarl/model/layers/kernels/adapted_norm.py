# SPDX-License-Identifier: Apache-2.0
"""RMSNorm (Zhang and Sennrich, arXiv:1910.07467) in front of an adapted linear, with a frozen weight.

A's gradient is formed from the norm's input, so that the norm's result need not be kept. Where a sum with the residual
stream lies before the norm, one kernel does both; ``residual`` and ``norm`` write the sum and read it again.

Shape letters: T tokens, H hidden size, R rows of A, r rank of the update before the norm.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from megarl import progress
from megarl.model.layers.kernels.low_rank import factors_of, low_rank_product, low_rows, rank_block
from megarl.model.layers.kernels.norm import by_states, normed_rows
from megarl.model.layers.kernels.rows import as_rows
from megarl.model.layers.kernels.through_gradients import through_gradients
from megarl.model.layers.updates import Update, flattened, update_gradients, with_room
from megarl.triton_support import ceil_div
from megarl.triton_support.quick_launch import QuickKernel

# Tile of a step of a program.
ROWS, COLUMNS, WARPS = 16, 256, 4


def rms_norm_projected(
    hidden: torch.Tensor, weight: torch.Tensor, eps: float, matrix: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalise the last dimension, in float32, rounded once; multiply the result by A.

    Args:
        hidden: ``[..., H]``, 16-bit; gets a gradient.
        weight: ``[H]``; gets none.
        eps: added to the mean square.
        matrix: every A of the linear behind the norm, ``[R, H]``.

    Returns:
        The norm ``[..., H]``, its product with A ``[..., R]``, and ``hidden`` for the residual stream. What comes back
        through the second is for A alone: the linear's gradient of the first takes it in (``updates.apart``).
    """
    return ProjectedNorm.apply(hidden, weight, eps, matrix)


class ProjectedNorm(torch.autograd.Function):
    """``rms_norm_projected`` as autograd takes it."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, eps: float, matrix: torch.Tensor) -> Any:
        """Compute ``rms_norm_projected``; keep its input."""
        normed, inverse = normed_rows(hidden, weight, eps)
        ctx.save_for_backward(hidden, weight, inverse, matrix)
        return normed, F.linear(normed, matrix), hidden.detach()

    @staticmethod
    def backward(ctx: Any, by_normed: torch.Tensor, by_low: torch.Tensor, beside: torch.Tensor | None) -> Any:
        """Return the gradients of ``hidden [..., H]`` and of A ``[R, H]``."""
        by_hidden, by_matrix = _gradients_of(by_normed, by_low, beside, *ctx.saved_tensors)
        return by_hidden, None, None, by_matrix


def add_and_norm(
    residual: torch.Tensor, out: torch.Tensor, update: Update, weight: torch.Tensor, eps: float, matrix: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what ``rms_norm_projected`` does for ``residual + out + update``, added in float32 and rounded once.

    Args:
        residual, out: ``[..., H]``, 16-bit.
        update: what is to be added to ``out``.
        weight, eps, matrix: see ``rms_norm_projected``.
    """
    return AddAndNorm.apply(residual, out, weight, eps, matrix, *flattened(update, 1))


class AddAndNorm(torch.autograd.Function):
    """``add_and_norm`` as autograd takes it, its update ``flattened``."""

    @staticmethod
    def forward(
        ctx: Any, residual: torch.Tensor, out: torch.Tensor, weight: torch.Tensor, eps: float, matrix: torch.Tensor,
        low: torch.Tensor, places: Any, added: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """Compute ``add_and_norm``; keep the sum, and ``low`` of its update."""
        progress.made()
        total, normed = (torch.empty_like(residual, memory_format=torch.contiguous_format) for _ in range(2))
        stream, rows = as_rows(residual), as_rows(out)
        (tokens, width), (factors, rank) = rows.shape, factors_of(low, added, places[0], rows)
        inverse = rows.new_empty(tokens, dtype=torch.float32)
        _add_norm[(ceil_div(tokens, ROWS),)](
            stream, rows, total, normed, inverse, weight, eps, tokens, stream.stride(0), rows.stride(0), *factors,
            WIDTH=width, RANK=rank, BLOCK=rank_block(rank), ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS,
        )  # fmt: skip
        ctx.save_for_backward(total, weight, inverse, matrix, low, added)
        ctx.places = places
        return normed, F.linear(normed, matrix), total

    @staticmethod
    def backward(ctx: Any, by_normed: torch.Tensor, by_projected: torch.Tensor, beside: torch.Tensor) -> Any:
        progress.made()
        total, weight, inverse, matrix, low, added = ctx.saved_tensors
        wide, narrow = with_room(beside, low.shape[-1])
        by_total, by_matrix = _gradients_of(by_normed, by_projected, beside, total, weight, inverse, matrix, wide)
        by_low, by_added = update_gradients(by_total, low, ctx.places, [added], into=narrow)
        return by_total, by_total, None, None, by_matrix, by_low, None, by_added


def _gradients_of(
    by_normed: torch.Tensor, by_low: torch.Tensor, beside: torch.Tensor | None, hidden: torch.Tensor,
    weight: torch.Tensor, inverse: torch.Tensor, matrix: torch.Tensor, into: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the gradients of ``hidden [..., H]`` and of A ``[R, H]``.

    Args:
        by_normed, by_low, beside: those of what ``rms_norm_projected`` returns; None for no gradient of the last.
        hidden, weight, matrix: its arguments.
        inverse: one over the root of each row of ``hidden``, float32 ``[T]``.
        into: memory for the first.
    """
    by_matrix = through_gradients(None, as_rows(by_low), hidden, matrix, (inverse, weight))
    return by_states(by_normed, hidden, weight, inverse, beside, into), by_matrix


@QuickKernel
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
