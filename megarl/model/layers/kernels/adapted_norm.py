# SPDX-License-Identifier: Apache-2.0
"""RMSNorm (Zhang and Sennrich, arXiv:1910.07467) in front of an adapted linear, with a frozen weight.

The norm's gradient takes in what comes back through the linear's A and along the residual stream, while it reads the
base's gradient. A's gradient is formed from the norm's input, so that the norm's result need not be kept. Where a sum
with the residual stream lies before the norm, one kernel does both; ``residual`` and ``norm`` write the sum and read it
again.

Shape letters: T tokens, H hidden size, R rows of A, r rank of the update before the norm.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from megarl import progress
from megarl.model.layers.kernels.chunk_sums import share_tokens, sum_chunks
from megarl.model.layers.kernels.low_rank import factors_of, low_rank_product, low_rows, matrix_columns, rank_block
from megarl.model.layers.kernels.norm import normed_rows
from megarl.model.layers.kernels.rows import as_rows
from megarl.model.layers.updates import Update, flattened, update_gradients

# Tile of a step of a program that sums and normalises some tokens, or forms their gradient.
ROWS, COLUMNS, WARPS = 16, 256, 4
# Tile of a step of a program that forms the gradient of some columns of A, and the stages of its loads.
STEP_ROWS, STEP_COLUMNS, STEP_WARPS, STEP_STAGES = 64, 64, 4, 3
# Rows of A; each program reads their gradients for its tokens. For more, products of their own are faster.
MOST = 96
# Programs to launch for A's gradient: enough for every multiprocessor of a GPU to have several.
PROGRAMS = 528


def takes(matrix: torch.Tensor) -> bool:
    """Return True if the kernels are worth it for A, ``[R, H]``."""
    return len(matrix) <= MOST


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
        The norm ``[..., H]``, its product with A ``[..., R]``, and ``hidden`` for the residual stream. Pass the first
        to the base of the linear and nowhere else.
    """
    return _ProjectedNorm.apply(hidden, weight, eps, matrix)


class _ProjectedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, eps: float, matrix: torch.Tensor) -> Any:
        """Compute ``rms_norm_projected``; keep its input and ``low``, which others keep too."""
        normed, inverse = normed_rows(hidden, weight, eps)
        low = F.linear(normed, matrix)
        ctx.save_for_backward(hidden, weight, inverse, matrix, low)
        return normed, low, hidden.detach()

    @staticmethod
    def backward(ctx: Any, by_normed: torch.Tensor, by_low: torch.Tensor, beside: torch.Tensor) -> Any:
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
        by_total, by_matrix = _gradients_of(by_normed, by_projected, beside, *of_norm)
        by_low, by_added = update_gradients(by_total, low, ctx.places, [added])
        return by_total, by_total, None, None, by_matrix, by_low, None, by_added


def _gradients_of(
    by_normed: torch.Tensor, by_low: torch.Tensor, beside: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor,
    inverse: torch.Tensor, matrix: torch.Tensor, low: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the gradients of ``hidden [..., H]`` and of A ``[R, H]``.

    Args:
        by_normed, by_low, beside: those of what ``rms_norm_projected`` returns.
        hidden, weight, matrix: its arguments.
        inverse: one over the root of each row of ``hidden``, float32 ``[T]``.
        low: the product with A.
    """
    narrow = as_rows(by_low)
    by_hidden = _by_hidden(as_rows(by_normed), narrow, as_rows(beside), hidden, weight, inverse, matrix, low)
    return by_hidden, _by_matrix(narrow, hidden, weight, inverse, matrix)


def _by_hidden(
    by_normed: torch.Tensor, by_low: torch.Tensor, beside: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor,
    inverse: torch.Tensor, matrix: torch.Tensor, low: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Return the gradient of ``hidden``, in float32 rounded once."""
    out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    rows, narrow = as_rows(hidden), as_rows(low)
    (tokens, width), rank = rows.shape, len(matrix)
    _slopes[(triton.cdiv(tokens, ROWS),)](
        rows, weight, inverse, by_normed, by_low, narrow, matrix.contiguous(), beside, out, tokens, rows.stride(0),
        by_normed.stride(0), by_low.stride(0), narrow.stride(0), beside.stride(0), WIDTH=width, RANK=rank,
        BLOCK=rank_block(rank), ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    return out


def _by_matrix(
    by_low: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, inverse: torch.Tensor, matrix: torch.Tensor
) -> torch.Tensor:
    """Return A's gradient, ``by_low.T @ norm``, rounded once."""
    rows, (rank, width) = as_rows(hidden), matrix.shape
    across = triton.cdiv(width, STEP_COLUMNS)
    own, programs = share_tokens(len(rows), PROGRAMS // across, STEP_ROWS)
    sums = rows.new_empty(programs, rank * width, dtype=torch.float32)
    _slopes_of_a[(programs, across)](
        rows, weight, inverse, by_low, sums, len(rows), own, rows.stride(0), by_low.stride(0), WIDTH=width, RANK=rank,
        BLOCK=rank_block(rank), ROWS=STEP_ROWS, COLUMNS=STEP_COLUMNS, num_warps=STEP_WARPS, num_stages=STEP_STAGES,
    )  # fmt: skip
    return sum_chunks(sums, matrix.dtype).view(rank, width)


@triton.jit
def _slopes(
    hidden, weight, inverse, by_normed, by_low, low, matrix, beside, out, tokens, stride, by_stride, by_low_stride,
    low_stride, beside_stride, WIDTH: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Form the gradients of ``ROWS`` tokens: first the part along the states themselves, then all of it.

    What comes through A adds ``by_low @ A`` to the norm's gradient. Along the norm that is ``by_low`` times ``low``.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there, k = row < tokens, tl.arange(0, BLOCK)
    root = tl.load(inverse + row, mask=there, other=0.0)
    through = low_rows(by_low, by_low_stride, row, k, tokens, RANK)
    projected = low_rows(low, low_stride, row, k, tokens, RANK).to(tl.float32)
    total = tl.sum(through.to(tl.float32) * projected, 1)
    for start in range(0, WIDTH, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside, states, slope, scale = _read(hidden, by_normed, weight, row, column, tokens, stride, by_stride, WIDTH)
        total += tl.sum(slope * scale[None, :] * states, 1) * root
    along = root * total / WIDTH
    for start in range(0, WIDTH, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside, states, slope, scale = _read(hidden, by_normed, weight, row, column, tokens, stride, by_stride, WIDTH)
        factor = matrix_columns(matrix, column, WIDTH, WIDTH, 1, RANK, BLOCK)
        slope = tl.dot(through, factor, slope, input_precision="ieee") * scale[None, :]
        value = root[:, None] * (slope - states * along[:, None])
        value += tl.load(beside + row[:, None] * beside_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row[:, None] * WIDTH + column[None, :], value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _read(hidden, by_normed, weight, row, column, tokens, stride, by_stride, WIDTH: tl.constexpr):
    """Return which places of a tile there are, its states and their gradient behind the norm, and its weights."""
    inside = (row < tokens)[:, None] & (column < WIDTH)[None, :]
    states = tl.load(hidden + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(by_normed + row[:, None] * by_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    return inside, states, slope, tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def _slopes_of_a(
    hidden, weight, inverse, by_low, sums, tokens, own, stride, low_stride, WIDTH: tl.constexpr, RANK: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Form what ``own`` tokens give to some columns of A's gradient, tile by tile."""
    column, k = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, BLOCK)
    across = column < WIDTH
    scale = tl.load(weight + column, mask=across, other=0.0).to(tl.float32)
    by_matrix = tl.zeros((COLUMNS, BLOCK), tl.float32)
    begin = tl.program_id(0).to(tl.int64) * own
    for start in range(0, own, ROWS):
        row = begin + start + tl.arange(0, ROWS)
        there = row < tokens
        inside = there[:, None] & across[None, :]
        states = tl.load(hidden + row[:, None] * stride + column[None, :], mask=inside, other=0.0)
        root = tl.load(inverse + row, mask=there, other=0.0)
        # Rounded as the norm was.
        normed = (states.to(tl.float32) * root[:, None] * scale[None, :]).to(states.dtype)
        narrow = low_rows(by_low, low_stride, row, k, tokens, RANK)
        by_matrix = tl.dot(tl.trans(normed), narrow, by_matrix, input_precision="ieee")
    at, of_matrix = k[:, None] * WIDTH + column[None, :], (k < RANK)[:, None] & across[None, :]
    tl.store(sums + tl.program_id(0).to(tl.int64) * RANK * WIDTH + at, tl.trans(by_matrix), mask=of_matrix)


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
