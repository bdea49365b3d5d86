# SPDX-License-Identifier: Apache-2.0
"""RMSNorm (Zhang and Sennrich, arXiv:1910.07467) with a frozen weight: one Triton kernel forward, one backward.

Shape letters: T tokens, H hidden size.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from megarl.model.layers.kernels.rows import as_rows, row_settings

FEATURES_OF_A_WARP = 512


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last dimension, in float32, rounded once.

    Args:
        hidden: ``[..., H]``, 16-bit.
        weight: ``[H]``; gets no gradient.
        eps: added to the mean square.

    Returns:
        ``[..., H]``.
    """
    return _RMSNorm.apply(hidden, weight, eps)


def gradient_of(gradient: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the gradient of ``hidden [T, H]``, from that of the result; the root is computed anew."""
    rows, normed = as_rows(hidden), torch.empty_like(hidden, memory_format=torch.contiguous_format)
    inverse = rows.new_empty(len(rows), dtype=torch.float32)
    _launch(_norm_forward, rows, weight, inverse, normed, eps)
    _launch(_norm_backward, rows, weight, inverse, as_rows(gradient), normed)  # overwrites the norm by the gradient
    return normed


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows, out = as_rows(hidden), torch.empty_like(hidden, memory_format=torch.contiguous_format)
        inverse = rows.new_empty(len(rows), dtype=torch.float32)
        ctx.save_for_backward(hidden, weight, inverse)
        _launch(_norm_forward, rows, weight, inverse, as_rows(out), eps)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        hidden, weight, inverse = ctx.saved_tensors
        by_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        _launch(_norm_backward, as_rows(hidden), weight, inverse, as_rows(gradient), by_hidden)
        return by_hidden, None, None


def _launch(
    kernel: Any, rows: torch.Tensor, weight: torch.Tensor, inverse: torch.Tensor, normed: torch.Tensor, last: Any
) -> None:
    tokens, width = rows.shape
    strides = rows.stride(0), normed.stride(0)
    kernel[(tokens,)](rows, weight, inverse, normed, last, *strides, **row_settings(width, FEATURES_OF_A_WARP))


@triton.jit
def _norm_forward(hidden, weight, inverse, out, eps, stride, out_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    values = tl.load(hidden + token * stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    root = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    tl.store(inverse + token, root)
    tl.store(out + token * out_stride + column, (values * root * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward(
    hidden, weight, inverse, by_out, by_hidden, stride, out_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    root = tl.load(inverse + token)
    normed = tl.load(hidden + token * stride + column, mask=inside, other=0.0).to(tl.float32) * root
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(by_out + token * out_stride + column, mask=inside, other=0.0).to(tl.float32) * scale
    along = tl.sum(slope * normed, 0) / WIDTH
    by_value = root * (slope - normed * along)
    tl.store(by_hidden + token * WIDTH + column, by_value.to(by_hidden.dtype.element_ty), mask=inside)
