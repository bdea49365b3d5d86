# SPDX-License-Identifier: Apache-2.0
"""Turn the fused q, k and v projection into attention's inputs, and add its adapter's update on the way.

What ``heads`` does, in tiles of tokens, because a low-rank product of one token alone would read all of B.

Shape letters: T tokens, G groups (KV heads), N query heads of a group, D head_dim.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from megarl import progress
from megarl.model.layers.kernels.heads import empty_parts
from megarl.model.layers.kernels.low_rank import factors_of, low_rank_tile, rank_block
from megarl.model.layers.updates import Update, flattened, update_gradients
from megarl.model.weights.fusion import HeadLayout

# Tokens of one program, which computes all heads of a group.
ROWS, WARPS = 32, 4
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def prepare_adapted_heads(
    fused: torch.Tensor, angles: torch.Tensor, weights: Any, eps: float, heads: HeadLayout, update: Update
) -> Triple:
    """Return what ``heads.prepare_heads`` does for ``fused`` plus an update.

    Args:
        fused, angles, weights, eps, heads: see ``heads.prepare_heads``.
        update: of queries, keys and values.
    """
    return _AdaptedHeads.apply(fused, angles, weights, eps, heads, *flattened(update, 3))


class _AdaptedHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, fused: torch.Tensor, angles: torch.Tensor, weights: Any, eps: float, heads: HeadLayout, low: Any,
        places: Any, *matrices: Any,
    ) -> Triple:  # fmt: skip
        progress.made()
        fused, angles, parts = fused.contiguous(), angles.contiguous(), empty_parts(fused, heads)
        _launch(_forward, fused, angles, weights, parts, (eps, heads), (low, places, matrices))
        ctx.save_for_backward(fused, angles, low, *matrices, *(weights or ()))
        ctx.settings, ctx.places = (eps, heads), places
        return parts

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        progress.made()
        fused, angles, low, *matrices = ctx.saved_tensors
        matrices, weights = matrices[:3], matrices[3:]
        by_fused = torch.empty_like(fused)
        tensors = (*(gradient.contiguous() for gradient in gradients), by_fused)
        _launch(_backward, fused, angles, weights, tensors, ctx.settings, (low, ctx.places, matrices))
        by_low, *by_matrices = update_gradients(by_fused, low, ctx.places, matrices, ctx.settings[1])
        return by_fused, None, None, None, None, by_low, None, *by_matrices


def _launch(
    kernel: Any, fused: torch.Tensor, angles: torch.Tensor, weights: Any, tensors: tuple[torch.Tensor, ...],
    settings: tuple[float, HeadLayout], update: tuple[Any, Any, Any],
) -> None:  # fmt: skip
    (eps, heads), (low, places, matrices), tokens = settings, update, fused.shape[0]
    half = heads.head_dim // 2
    products = [factors_of(low, matrix, place, fused) for place, matrix in zip(places, matrices, strict=True)]
    ranks = tuple(rank for _, rank in products)
    kernel[(triton.cdiv(tokens, ROWS), heads.groups)](
        fused, angles, *(weights or (fused, fused)), *tensors, eps, tokens, *(tuple(one) for one, _ in products),
        RANKS=ranks, BLOCKS=tuple(map(rank_block, ranks)), GROUPS=heads.groups, QUERIES=heads.queries, HALF=half,
        NORM=bool(weights), BLOCK=triton.next_power_of_2(half), ROWS=ROWS, num_warps=WARPS,
    )  # fmt: skip


@triton.jit
def _forward(
    fused, angles, query_weight, key_weight, query, key, value, eps, tokens, of_query, of_key, of_value,
    RANKS: tl.constexpr, BLOCKS: tl.constexpr, GROUPS: tl.constexpr, QUERIES: tl.constexpr, HALF: tl.constexpr,
    NORM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, column, inside, group, slot = _locate(tokens, QUERIES, HALF, BLOCK, ROWS)
    cos, sin = _turn(angles, row, column, inside, HALF)
    SLOTS: tl.constexpr = GROUPS * (QUERIES + 2)
    for within in range(QUERIES):
        head, at = group * QUERIES + within, slot + within
        first, second = _read(fused, of_query, row, column, inside, tokens, at, head, SLOTS, HALF, RANKS[0], BLOCKS[0])
        first, second = _normed(first, second, query_weight, column, eps, HALF, NORM)
        first, second = first * cos - second * sin, second * cos + first * sin
        _write(query, row, column, inside, head, GROUPS * QUERIES, HALF, first, second)
    at = slot + QUERIES
    first, second = _read(fused, of_key, row, column, inside, tokens, at, group, SLOTS, HALF, RANKS[1], BLOCKS[1])
    first, second = _normed(first, second, key_weight, column, eps, HALF, NORM)
    first, second = first * cos - second * sin, second * cos + first * sin
    _write(key, row, column, inside, group, GROUPS, HALF, first, second)
    first, second = _read(fused, of_value, row, column, inside, tokens, at + 1, group, SLOTS, HALF, RANKS[2], BLOCKS[2])
    _write(value, row, column, inside, group, GROUPS, HALF, first, second)


@triton.jit
def _backward(
    fused, angles, query_weight, key_weight, by_query, by_key, by_value, by_fused, eps, tokens, of_query, of_key,
    of_value, RANKS: tl.constexpr, BLOCKS: tl.constexpr, GROUPS: tl.constexpr, QUERIES: tl.constexpr,
    HALF: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, column, inside, group, slot = _locate(tokens, QUERIES, HALF, BLOCK, ROWS)
    cos, sin = _turn(angles, row, column, inside, HALF)
    SLOTS: tl.constexpr = GROUPS * (QUERIES + 2)
    for within in range(QUERIES):
        head, at = group * QUERIES + within, slot + within
        first, second = _halves(by_query, row, column, inside, head, GROUPS * QUERIES, HALF)
        first, second = first * cos + second * sin, second * cos - first * sin
        if NORM:
            was, were = _read(fused, of_query, row, column, inside, tokens, at, head, SLOTS, HALF, RANKS[0], BLOCKS[0])
            first, second = _norm_back(first, second, was, were, query_weight, column, eps, HALF)
        _write(by_fused, row, column, inside, at, SLOTS, HALF, first, second)
    at = slot + QUERIES
    first, second = _halves(by_key, row, column, inside, group, GROUPS, HALF)
    first, second = first * cos + second * sin, second * cos - first * sin
    if NORM:
        was, were = _read(fused, of_key, row, column, inside, tokens, at, group, SLOTS, HALF, RANKS[1], BLOCKS[1])
        first, second = _norm_back(first, second, was, were, key_weight, column, eps, HALF)
    _write(by_fused, row, column, inside, at, SLOTS, HALF, first, second)
    first, second = _halves(by_value, row, column, inside, group, GROUPS, HALF)
    _write(by_fused, row, column, inside, at + 1, SLOTS, HALF, first, second)


@triton.jit
def _locate(tokens, QUERIES: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Return this program's tokens, the features of a half, which exist, the group, and its first head's number."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column, group = tl.arange(0, BLOCK).to(tl.int64), tl.program_id(1)
    return row, column, (row < tokens)[:, None] & (column < HALF)[None, :], group, group * (QUERIES + 2)


@triton.jit
def _turn(angles, row, column, inside, HALF: tl.constexpr):
    angle = tl.load(angles + row[:, None] * 2 * HALF + column[None, :], mask=inside, other=0.0)
    return tl.cos(angle), tl.sin(angle)


@triton.jit
def _read(
    fused, factors, row, column, inside, tokens, slot, head, SLOTS: tl.constexpr, HALF: tl.constexpr,
    RANK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return both halves of a head with the update. ``head`` is its number among those of its kind."""
    first, second = _halves(fused, row, column, inside, slot, SLOTS, HALF)
    if RANK > 0:
        low, scale, stride = factors[0], factors[2], factors[3]
        matrix = factors[1] + head * 2 * HALF * RANK
        first += low_rank_tile(low, matrix, scale, stride, row, column, tokens, HALF, 1, RANK, RANK, BLOCK)
        matrix += HALF * RANK
        second += low_rank_tile(low, matrix, scale, stride, row, column, tokens, HALF, 1, RANK, RANK, BLOCK)
    return first, second


@triton.jit
def _halves(states, row, column, inside, head, HEADS: tl.constexpr, HALF: tl.constexpr):
    """Return both halves of a head in float32."""
    place = states + (row[:, None] * HEADS + head) * 2 * HALF + column[None, :]
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    return first, tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _normed(first, second, weight, column, eps, HALF: tl.constexpr, NORM: tl.constexpr):
    if NORM:
        scale = tl.rsqrt(tl.sum(first * first + second * second, 1) / (2 * HALF) + eps)[:, None]
        first *= scale * tl.load(weight + column, mask=column < HALF, other=0.0).to(tl.float32)[None, :]
        second *= scale * tl.load(weight + HALF + column, mask=column < HALF, other=0.0).to(tl.float32)[None, :]
    return first, second


@triton.jit
def _norm_back(first, second, was_first, was_second, weight, column, eps, HALF: tl.constexpr):
    """Return the gradient of the norm's input, from those of its output and from the input."""
    scale = tl.rsqrt(tl.sum(was_first * was_first + was_second * was_second, 1) / (2 * HALF) + eps)
    first *= tl.load(weight + column, mask=column < HALF, other=0.0).to(tl.float32)[None, :]
    second *= tl.load(weight + HALF + column, mask=column < HALF, other=0.0).to(tl.float32)[None, :]
    along = (tl.sum(was_first * first + was_second * second, 1) * scale * scale / (2 * HALF))[:, None]
    return scale[:, None] * (first - was_first * along), scale[:, None] * (second - was_second * along)


@triton.jit
def _write(out, row, column, inside, head, HEADS: tl.constexpr, HALF: tl.constexpr, first, second):
    place = out + (row[:, None] * HEADS + head) * 2 * HALF + column[None, :]
    tl.store(place, first.to(out.dtype.element_ty), mask=inside)
    tl.store(place + HALF, second.to(out.dtype.element_ty), mask=inside)
