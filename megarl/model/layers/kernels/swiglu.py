# SPDX-License-Identifier: Apache-2.0
"""Compute SwiGLU in one Triton kernel forward and one backward.

Shape letters: T tokens, I features of the gate on this rank.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from megarl.model.layers.kernels.rows import as_rows
from megarl.triton_support import ceil_div
from megarl.triton_support.fast_math import sigmoid
from megarl.triton_support.quick_launch import QuickKernel

# Tile of one program: small, so that its registers leave room for other programs, which hide the memory's latency.
ROWS, COLUMNS, WARPS = 32, 128, 8


def swiglu(fused: torch.Tensor) -> torch.Tensor:
    """Compute ``silu(gate) * up`` (Shazeer, arXiv:2002.05202) in float32, rounded once.

    Args:
        fused: ``[..., 2 I]``, 16-bit: gate, then up.

    Returns:
        ``[..., I]``.
    """
    return _SwiGLU.apply(fused)


def result_of(fused: torch.Tensor) -> torch.Tensor:
    """Compute ``swiglu`` without autograd."""
    out = empty_result(fused)
    _launch(_swiglu_forward, as_rows(fused), as_rows(out))
    return out


def empty_result(fused: torch.Tensor) -> torch.Tensor:
    """Return memory for what ``result_of`` computes."""
    return fused.new_empty(*fused.shape[:-1], fused.shape[-1] // 2)


def gradient_of(gradient: torch.Tensor, fused: torch.Tensor) -> torch.Tensor:
    """Return the gradient of ``fused [..., 2 I]``, from that of the result."""
    by_fused = torch.empty_like(fused, memory_format=torch.contiguous_format)
    _launch(_swiglu_backward, as_rows(fused), as_rows(gradient), by_fused)
    return by_fused


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fused: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(fused)
        return result_of(fused)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient_of(gradient, *ctx.saved_tensors)


def _launch(kernel: Any, fused: torch.Tensor, narrow: torch.Tensor, *others: torch.Tensor) -> None:
    tokens, width = narrow.shape
    grid = (ceil_div(tokens, ROWS), ceil_div(width, COLUMNS))
    strides = fused.stride(0), narrow.stride(0)
    kernel[grid](fused, narrow, *others, tokens, *strides, WIDTH=width, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS)


@QuickKernel
@triton.jit
def _swiglu_forward(
    fused, out, tokens, fused_stride, stride, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    row, column, inside, gate, up = _gate_and_up(fused, tokens, fused_stride, WIDTH, ROWS, COLUMNS)
    active = gate * sigmoid(gate) * up
    tl.store(out + row[:, None] * stride + column[None, :], active.to(out.dtype.element_ty), mask=inside)


@QuickKernel
@triton.jit
def _swiglu_backward(
    fused, by_out, by_fused, tokens, fused_stride, stride, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column, inside, gate, up = _gate_and_up(fused, tokens, fused_stride, WIDTH, ROWS, COLUMNS)
    slope = tl.load(by_out + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    by_gate, by_up = slopes(slope, gate, up)
    place = by_fused + row[:, None] * 2 * WIDTH + column[None, :]
    tl.store(place, by_gate.to(by_fused.dtype.element_ty), mask=inside)
    tl.store(place + WIDTH, by_up.to(by_fused.dtype.element_ty), mask=inside)


@triton.jit
def slopes(slope, gate, up):
    """Return the gradients of gate and up, from that of ``silu(gate) * up``; all in float32."""
    gated = sigmoid(gate)
    return slope * up * gated * (1.0 + gate * (1.0 - gated)), slope * gate * gated


@triton.jit
def _gate_and_up(fused, tokens, stride, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return this program's rows and columns, and its tile of gate and of up in float32."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < tokens)[:, None] & (column < WIDTH)[None, :]
    place = fused + row[:, None] * stride + column[None, :]
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + WIDTH, mask=inside, other=0.0).to(tl.float32)
    return row, column, inside, gate, up
