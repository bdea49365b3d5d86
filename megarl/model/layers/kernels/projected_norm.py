# SPDX-License-Identifier: Apache-2.0
"""RMSNorm before an adapted linear: its backward kernel adds the gradient that comes through the adapters' A.

Added by a product of its own, that gradient moves the norm's wide gradient through memory twice more. The kernel has
tiles of tokens, because a low-rank product of one token alone would read all of A.

Shape letters: T tokens, H hidden size, R rows of A.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from megarl.model.layers.kernels.low_rank import low_rank_tile, rank_block
from megarl.model.layers.kernels.norm import result_of
from megarl.model.layers.kernels.rows import as_rows

# Tile of a step of one program, which computes whole rows.
ROWS, COLUMNS, WARPS = 16, 256, 4
# Rows of A that a tile can hold.
MOST = 128


def takes(matrix: torch.Tensor) -> bool:
    """Return True if the kernel can add what comes through ``matrix [R, H]``."""
    return len(matrix) <= MOST


def rms_norm_projected(
    hidden: torch.Tensor, weight: torch.Tensor, eps: float, matrix: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what ``norm.rms_norm_beside`` does, and the norm's product with A.

    Args:
        hidden, weight, eps: see ``norm.rms_norm``.
        matrix: A, ``[R, H]``.

    Returns:
        The norm and ``hidden``, ``[..., H]``, and the product, ``[..., R]``. Pass the norm to the linear's base and
        nowhere else.
    """
    return _RMSNormProjected.apply(hidden, weight, eps, matrix)


class _RMSNormProjected(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, eps: float, matrix: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute ``rms_norm_projected``; keep the norm, which A's gradient is formed from."""
        out, inverse = result_of(hidden, weight, eps)
        low = F.linear(out, matrix)
        ctx.save_for_backward(hidden, weight, inverse, matrix, out, low)
        return out, hidden.detach(), low

    @staticmethod
    def backward(ctx: Any, by_out: torch.Tensor, beside: torch.Tensor, by_low: torch.Tensor) -> Any:
        """Return the gradients of ``hidden [..., H]`` and of A ``[R, H]``."""
        hidden, weight, inverse, matrix, out, low = ctx.saved_tensors
        narrow = as_rows(by_low)
        by_matrix = narrow.t() @ as_rows(out) if ctx.needs_input_grad[3] else None
        if not ctx.needs_input_grad[0]:
            return None, None, None, by_matrix
        return _by_hidden((hidden, weight, inverse), by_out, beside, (low, narrow, matrix)), None, None, by_matrix


def _by_hidden(
    norm: tuple[torch.Tensor, ...], by_out: torch.Tensor, beside: torch.Tensor, product: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """Return the gradient of ``hidden``, from those of the norm, of the residual stream and of the product."""
    (hidden, weight, inverse), (low, by_low, matrix) = norm, product
    by_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    rows, along, added, narrow = (as_rows(tensor) for tensor in (hidden, by_out, beside, low))
    (tokens, width), rank = rows.shape, len(matrix)
    _backward[(triton.cdiv(tokens, ROWS),)](
        rows, weight, inverse, along, by_hidden, added, narrow, by_low, matrix.contiguous(), tokens, rows.stride(0),
        along.stride(0), added.stride(0), narrow.stride(0), by_low.stride(0), WIDTH=width, RANK=rank,
        BLOCK=rank_block(rank), ROWS=ROWS, COLUMNS=min(COLUMNS, triton.next_power_of_2(width)), num_warps=WARPS,
    )  # fmt: skip
    return by_hidden


@triton.jit
def _backward(
    hidden, weight, inverse, by_out, by_hidden, beside, low, by_low, matrix, tokens, stride, out_stride, beside_stride,
    low_stride, by_low_stride, WIDTH: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    held = row < tokens
    root = tl.load(inverse + row, mask=held, other=0.0)[:, None]
    k = tl.arange(0, BLOCK)
    narrow = held[:, None] & (k < RANK)[None, :]
    lows = tl.load(low + row[:, None] * low_stride + k[None, :], mask=narrow, other=0.0).to(tl.float32)
    by_lows = tl.load(by_low + row[:, None] * by_low_stride + k[None, :], mask=narrow, other=0.0).to(tl.float32)
    # The part of the mean that comes through A is a product of narrow rows: (by_low @ A) . out = by_low . low.
    along = tl.sum(lows * by_lows, 1)
    for begin in range(0, WIDTH, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        normed, slope = _read(hidden, by_out, row, column, held, root, stride, out_stride, WIDTH)
        scale = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
        along += tl.sum(slope * scale * normed, 1)
    along = (along / WIDTH)[:, None]
    for begin in range(0, WIDTH, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        inside = held[:, None] & (column < WIDTH)[None, :]
        normed, slope = _read(hidden, by_out, row, column, held, root, stride, out_stride, WIDTH)
        slope += low_rank_tile(by_low, matrix, 1.0, by_low_stride, row, column, tokens, WIDTH, WIDTH, 1, RANK, BLOCK)
        scale = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
        by_value = root * (slope * scale - normed * along)
        by_value += tl.load(beside + row[:, None] * beside_stride + column[None, :], mask=inside, other=0.0)
        target = by_hidden + row[:, None] * WIDTH + column[None, :]
        tl.store(target, by_value.to(by_hidden.dtype.element_ty), mask=inside)


@triton.jit
def _read(hidden, by_out, row, column, held, root, stride, out_stride, WIDTH: tl.constexpr):
    """Return a tile of the normed input, without the weight, and of the norm's gradient; float32."""
    inside = held[:, None] & (column < WIDTH)[None, :]
    normed = tl.load(hidden + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32) * root
    slope = tl.load(by_out + row[:, None] * out_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    return normed, slope
