# SPDX-License-Identifier: Apache-2.0
"""Compute SwiGLU times a weight of each token, as experts do: one Triton kernel forward, one backward.

Shape letters: T tokens, F features of the gate on this rank.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from megarl.model.layers.kernels.rows import as_rows, row_settings
from megarl.model.layers.kernels.swiglu import empty_result, slopes
from megarl.triton_support.fast_math import sigmoid
from megarl.triton_support.quick_launch import QuickKernel

FEATURES_OF_A_WARP = 256


def weighted_swiglu(fused: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Compute ``silu(gate) * up * weight`` (Shazeer, arXiv:2002.05202) in float32, rounded once.

    Args:
        fused: ``[T, 2 F]``, 16-bit: gate, then up.
        weights: ``[T]``, of any dtype.

    Returns:
        ``[T, F]``.
    """
    return _WeightedSwiGLU.apply(fused, weights)


class _WeightedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fused: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(fused, weights)
        out = empty_result(fused)
        _launch(_forward, as_rows(fused), weights.contiguous(), out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        fused, weights = ctx.saved_tensors
        by_fused = torch.empty_like(fused, memory_format=torch.contiguous_format)
        by_weights = torch.empty_like(weights, memory_format=torch.contiguous_format)
        _launch(_backward, as_rows(fused), weights.contiguous(), as_rows(gradients[0]), by_fused, by_weights)
        return by_fused, by_weights


def _launch(
    kernel: Any, fused: torch.Tensor, weights: torch.Tensor, narrow: torch.Tensor, *others: torch.Tensor
) -> None:
    tokens, width = narrow.shape
    strides = fused.stride(0), narrow.stride(0)
    if tokens:
        kernel[(tokens,)](fused, weights, narrow, *others, *strides, **row_settings(width, FEATURES_OF_A_WARP))


@QuickKernel
@triton.jit
def _forward(fused, weights, out, fused_stride, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token, column, inside, gate, up, weight = _operands(fused, weights, fused_stride, WIDTH, BLOCK)
    active = gate * sigmoid(gate) * up * weight
    tl.store(out + token * stride + column, active.to(out.dtype.element_ty), mask=inside)


@QuickKernel
@triton.jit
def _backward(
    fused, weights, by_out, by_fused, by_weights, fused_stride, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    token, column, inside, gate, up, weight = _operands(fused, weights, fused_stride, WIDTH, BLOCK)
    slope = tl.load(by_out + token * stride + column, mask=inside, other=0.0).to(tl.float32)
    along = tl.sum(slope * gate * sigmoid(gate) * up, 0)
    tl.store(by_weights + token, along.to(by_weights.dtype.element_ty))
    by_gate, by_up = slopes(slope * weight, gate, up)
    place = by_fused + token * 2 * WIDTH + column
    tl.store(place, by_gate.to(by_fused.dtype.element_ty), mask=inside)
    tl.store(place + WIDTH, by_up.to(by_fused.dtype.element_ty), mask=inside)


@triton.jit
def _operands(fused, weights, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Return this program's token, its columns, and gate, up and weight in float32."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    place = fused + token * stride + column
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + WIDTH, mask=inside, other=0.0).to(tl.float32)
    return token, column, inside, gate, up, tl.load(weights + token).to(tl.float32)
