# SPDX-License-Identifier: Apache-2.0
"""RMSNorm (Zhang and Sennrich, arXiv:1910.07467) with a frozen weight: one Triton kernel forward, one backward.

Shape letters: T tokens, H hidden size.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from megarl.model.layers.kernels.rows import as_rows, row_settings
from megarl.triton_support.quick_launch import QuickKernel

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


def rms_norm_beside(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``rms_norm``'s result and ``hidden``, whose gradients the backward kernel adds up in float32.

    Args:
        hidden, weight, eps: see ``rms_norm``.
    """
    return _RMSNormBeside.apply(hidden, weight, eps)


def gradient_of(gradient: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the gradient of ``hidden [T, H]``, from that of the result; the root is computed anew."""
    _, inverse = normed_rows(hidden, weight, eps)
    return by_states(gradient, hidden, weight, inverse)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out, inverse = normed_rows(hidden, weight, eps)
        ctx.save_for_backward(hidden, weight, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        hidden, weight, inverse = ctx.saved_tensors
        return by_states(gradient, hidden, weight, inverse), None, None


class _RMSNormBeside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        return _RMSNorm.forward(ctx, hidden, weight, eps), hidden.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, beside: torch.Tensor) -> Any:
        hidden, weight, inverse = ctx.saved_tensors
        return by_states(gradient, hidden, weight, inverse, beside), None, None


def by_states(
    gradient: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, inverse: torch.Tensor,
    beside: torch.Tensor | None = None, into: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the gradient of ``hidden``, plus ``beside``; in the memory ``into``, if that is given."""
    by_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if into is None else into
    rows, along, out = as_rows(hidden), as_rows(gradient), as_rows(by_hidden)
    added, (tokens, width) = along if beside is None else as_rows(beside), rows.shape
    _norm_backward[(tokens,)](
        rows, weight, inverse, along, out, added, rows.stride(0), along.stride(0), added.stride(0), out.stride(0),
        BESIDE=beside is not None, **row_settings(width, FEATURES_OF_A_WARP),
    )  # fmt: skip
    return by_hidden


def normed_rows(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm, and one over the root of each row, float32."""
    rows, out = as_rows(hidden), torch.empty_like(hidden, memory_format=torch.contiguous_format)
    (tokens, width), normed = rows.shape, as_rows(out)
    inverse = rows.new_empty(tokens, dtype=torch.float32)
    _norm_forward[(tokens,)](
        rows, weight, inverse, normed, eps, rows.stride(0), width, **row_settings(width, FEATURES_OF_A_WARP)
    )
    return out, inverse


@QuickKernel
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


@QuickKernel
@triton.jit
def _norm_backward(
    hidden, weight, inverse, by_out, by_hidden, beside, stride, out_stride, beside_stride, by_stride,
    BESIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
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
    if BESIDE:
        by_value += tl.load(beside + token * beside_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(by_hidden + token * by_stride + column, by_value.to(by_hidden.dtype.element_ty), mask=inside)
