# SPDX-License-Identifier: Apache-2.0
"""Turn the fused q, k and v projection into attention's inputs: one Triton kernel forward, one backward.

As separate operations, the split, the norms of queries and keys, RoPE and the copies around them take an eighth of a
small model's time on a GPU, all of it reading and writing the same activations. These kernels read and write each
activation once per direction and compute in float32 in between. Under LoRA the norms' weights are frozen and get no
gradient; that gradient is what makes a norm's backward pass slow.

Shape letters: T tokens, G groups (KV heads), N query heads of a group, D head_dim.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from megarl.model.weights.fusion import HeadLayout
from megarl.triton_support import ceil_div, power_of_two
from megarl.triton_support.fast_math import cos_sin
from megarl.triton_support.quick_launch import QuickKernel

SLOTS = 32  # heads that one program handles


def prepare_heads(
    fused: torch.Tensor,
    angles: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    heads: HeadLayout,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split the heads, normalise (Zhang and Sennrich, arXiv:1910.07467) and rotate (Su et al., arXiv:2104.09864).

    Args:
        fused: ``[T, 1, G * (N + 2) * D]``, 16-bit. A group's queries, its key and its value lie together.
        angles: ``[T, 1, 1, D]`` float32, radians; the second half repeats the first.
        weights: weights of the norms of queries and keys, ``[D]`` each; None for no norm. They get no gradient.
        eps: epsilon of the norms.
        heads: this rank's heads.

    Returns:
        Queries ``[T, 1, G * N, D]``, keys ``[T, 1, G, D]`` and values ``[T, 1, G, D]``, contiguous.
    """
    return _SplitHeads.apply(fused, angles, weights, eps, heads)


def result_of(
    fused: torch.Tensor, angles: torch.Tensor, weights: Any, eps: float, heads: HeadLayout
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute ``prepare_heads`` without autograd; T is the first dimension. ``weights`` is empty without norms."""
    parts = empty_parts(fused, heads)
    fused = fused.contiguous()
    _launch(_heads_forward, parts, fused, angles.contiguous(), weights, eps, heads, fused.stride(0))
    return parts


def empty_parts(fused: torch.Tensor, heads: HeadLayout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return memory for what ``result_of`` computes."""
    counts = (heads.groups * heads.queries, heads.groups, heads.groups)
    query, key, value = (fused.new_empty(*fused.shape[:-1], count, heads.head_dim) for count in counts)
    return query, key, value


def gradient_of(
    gradients: tuple[torch.Tensor, ...], fused: torch.Tensor, angles: torch.Tensor, weights: Any, eps: float,
    heads: HeadLayout, into: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the gradient of ``fused``, from those of queries, keys and values.

    Args:
        gradients: those of ``result_of``.
        fused, angles, eps, heads: its arguments.
        weights: likewise; empty without norms.
        into: memory for the result, in the shape of ``fused``; T is its first dimension.
    """
    by_fused = torch.empty_like(fused, memory_format=torch.contiguous_format) if into is None else into
    parts = (*(gradient.contiguous() for gradient in gradients), by_fused)
    stride = by_fused.stride(0)
    _launch(_heads_backward, parts, fused.contiguous(), angles.contiguous(), weights, eps, heads, stride)
    return by_fused


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, fused: torch.Tensor, angles: torch.Tensor, weights: Any, eps: float, heads: HeadLayout
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run the forward kernel; see ``prepare_heads``."""
        fused, angles = fused.contiguous(), angles.contiguous()
        ctx.save_for_backward(fused, angles, *(weights or ()))
        ctx.eps, ctx.heads = eps, heads
        return result_of(fused, angles, weights, eps, heads)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        fused, angles, *weights = ctx.saved_tensors
        return gradient_of(gradients, fused, angles, weights, ctx.eps, ctx.heads), None, None, None, None


def _launch(
    kernel: Any, parts: tuple[torch.Tensor, ...], fused: torch.Tensor, angles: torch.Tensor, weights: Any, eps: float,
    heads: HeadLayout, stride: int,
) -> None:  # fmt: skip
    slots, half = heads.groups * (heads.queries + 2), heads.head_dim // 2
    grid = (fused.shape[0], ceil_div(slots, SLOTS))
    kernel[grid](
        fused,
        angles,
        *(weights or (fused, fused)),
        *parts,
        eps,
        stride,
        GROUPS=heads.groups,
        QUERIES=heads.queries,
        HALF=half,
        NORM=bool(weights),
        BLOCK=power_of_two(half),
        SLOTS=SLOTS,
        num_warps=4,
    )


@QuickKernel
@triton.jit
def _heads_forward(
    fused, angles, query_weight, key_weight, query, key, value, eps, stride,
    GROUPS: tl.constexpr, QUERIES: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = fused + token * stride
    slot, column, inside, is_query, is_value, place = _locate(row, GROUPS, QUERIES, HALF, BLOCK, SLOTS)
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.where(is_value, 1.0, _inverse_rms(first, second, eps, HALF))[:, None]
        first *= scale * _weight(query_weight, key_weight, column, is_query, is_value, HALF)
        second *= scale * _weight(query_weight + HALF, key_weight + HALF, column, is_query, is_value, HALF)
    cos, sin = _turn(angles, token, column, is_value, HALF)
    turned_first = (first * cos - second * sin).to(query.dtype.element_ty)
    turned_second = (second * cos + first * sin).to(query.dtype.element_ty)
    group, within = slot // (QUERIES + 2), slot % (QUERIES + 2)
    at_query = _rows(query, token, GROUPS * QUERIES, group * QUERIES + within, column, HALF)
    at_key = _rows(key, token, GROUPS, group, column, HALF)
    at_value = _rows(value, token, GROUPS, group, column, HALF)
    for_query = inside & is_query[:, None]
    for_value = inside & is_value[:, None]
    for_key = inside & (within == QUERIES)[:, None]
    tl.store(at_query, turned_first, mask=for_query)
    tl.store(at_query + HALF, turned_second, mask=for_query)
    tl.store(at_key, turned_first, mask=for_key)
    tl.store(at_key + HALF, turned_second, mask=for_key)
    tl.store(at_value, turned_first, mask=for_value)
    tl.store(at_value + HALF, turned_second, mask=for_value)


@QuickKernel
@triton.jit
def _heads_backward(
    fused, angles, query_weight, key_weight, by_query, by_key, by_value, by_fused, eps, stride,
    GROUPS: tl.constexpr, QUERIES: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = by_fused + token * stride
    slot, column, inside, is_query, is_value, place = _locate(row, GROUPS, QUERIES, HALF, BLOCK, SLOTS)
    group, within = slot // (QUERIES + 2), slot % (QUERIES + 2)
    at_query = _rows(by_query, token, GROUPS * QUERIES, group * QUERIES + within, column, HALF)
    at_key = _rows(by_key, token, GROUPS, group, column, HALF)
    at_value = _rows(by_value, token, GROUPS, group, column, HALF)
    at = tl.where(is_query[:, None], at_query, tl.where(is_value[:, None], at_value, at_key))
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    cos, sin = _turn(angles, token, column, is_value, HALF)
    back_first = first * cos + second * sin
    back_second = second * cos - first * sin
    if NORM:
        row = fused + token * GROUPS * (QUERIES + 2) * 2 * HALF
        _, _, _, _, _, source = _locate(row, GROUPS, QUERIES, HALF, BLOCK, SLOTS)
        was_first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        was_second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
        scale = _inverse_rms(was_first, was_second, eps, HALF)
        back_first *= _weight(query_weight, key_weight, column, is_query, is_value, HALF)
        back_second *= _weight(query_weight + HALF, key_weight + HALF, column, is_query, is_value, HALF)
        along = tl.sum(was_first * back_first + was_second * back_second, 1) * scale * scale / (2 * HALF)
        along = tl.where(is_value, 0.0, along)[:, None]
        scale = tl.where(is_value, 1.0, scale)[:, None]
        back_first = scale * (back_first - was_first * along)
        back_second = scale * (back_second - was_second * along)
    tl.store(place, back_first.to(by_fused.dtype.element_ty), mask=inside)
    tl.store(place + HALF, back_second.to(by_fused.dtype.element_ty), mask=inside)


@triton.jit
def _locate(
    row, GROUPS: tl.constexpr, QUERIES: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr
):  # fmt: skip
    """Locate this program's heads, and the first halves of their features in a row of the fused tensor."""
    slot = tl.program_id(1) * SLOTS + tl.arange(0, SLOTS)
    column = tl.arange(0, BLOCK)
    inside = (slot < GROUPS * (QUERIES + 2))[:, None] & (column < HALF)[None, :]
    within = slot % (QUERIES + 2)
    place = row + slot[:, None] * 2 * HALF + column[None, :]
    return slot, column, inside, within < QUERIES, within == QUERIES + 1, place


@triton.jit
def _rows(base, token, HEADS: tl.constexpr, head, column, HALF: tl.constexpr):
    return base + (token * HEADS + head[:, None]) * 2 * HALF + column[None, :]


@triton.jit
def _inverse_rms(first, second, eps, HALF: tl.constexpr):
    return tl.rsqrt(tl.sum(first * first + second * second, 1) / (2 * HALF) + eps)


@triton.jit
def _weight(query_weight, key_weight, column, is_query, is_value, HALF: tl.constexpr):
    of_query = tl.load(query_weight + column, mask=column < HALF, other=0.0).to(tl.float32)
    of_key = tl.load(key_weight + column, mask=column < HALF, other=0.0).to(tl.float32)
    chosen = tl.where(is_query[:, None], of_query[None, :], of_key[None, :])
    return tl.where(is_value[:, None], 1.0, chosen)


@triton.jit
def _turn(angles, token, column, is_value, HALF: tl.constexpr):
    """Return cosine and sine for each head and feature; 1 and 0 for values, which are not rotated."""
    angle = tl.load(angles + token * 2 * HALF + column, mask=column < HALF, other=0.0)[None, :]
    still = is_value[:, None]
    cos, sin = cos_sin(angle)
    return tl.where(still, 1.0, cos), tl.where(still, 0.0, sin)
