# SPDX-License-Identifier: Apache-2.0
"""Turn the fused q, k and v projection into attention's inputs, and add its adapter's update on the way.

The forward pass does what ``heads`` does, in tiles of tokens, because a low-rank product of one token alone would read
all of B. The backward pass is that of ``heads``.

Shape letters: T tokens, G groups (KV heads), N query heads of a group, D head_dim.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from megarl import progress
from megarl.model.layers.kernels.heads import empty_parts, gradient_of
from megarl.model.layers.kernels.low_rank import factors_of, low_rank_product, low_rows, rank_block
from megarl.model.layers.updates import Update, flattened, update_gradients
from megarl.model.weights.fusion import HeadLayout
from megarl.triton_support.fast_math import cos_sin

# Tokens of one program. It computes their angles once, and all heads of some groups.
ROWS, WARPS = 16, 2
# Programs to launch at least, if the heads allow: enough for every multiprocessor of a GPU to have several.
PROGRAMS = 1024
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def prepare_adapted_heads(
    fused: torch.Tensor, angles: torch.Tensor, weights: Any, eps: float, heads: HeadLayout, update: Update
) -> Triple:
    """Return what ``heads.prepare_heads`` does for ``fused`` plus an update.

    Args:
        fused: see ``heads.prepare_heads``; overwritten.
        angles, weights, eps, heads: see ``heads.prepare_heads``.
        update: of queries, keys and values.
    """
    return _AdaptedHeads.apply(fused, angles, weights, eps, heads, *flattened(update, 3))


class _AdaptedHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, fused: torch.Tensor, angles: torch.Tensor, weights: Any, eps: float, heads: HeadLayout, low: Any,
        places: Any, *matrices: Any,
    ) -> Triple:  # fmt: skip
        """Compute ``prepare_adapted_heads``; keep ``fused`` with what the norms' backward pass reads."""
        progress.made()
        fused, angles, parts = fused.contiguous(), angles.contiguous(), empty_parts(fused, heads)
        products = [factors_of(low, matrix, place, fused) for place, matrix in zip(places, matrices, strict=True)]
        # The norms' backward pass reads queries and keys with their updates.
        _launch(
            fused, angles, weights, parts, (eps, heads), products, keeps=bool(weights) and any(ctx.needs_input_grad)
        )
        ctx.save_for_backward(fused, angles, low, *matrices, *(weights or ()))
        ctx.settings, ctx.places = (eps, heads), places
        return parts

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        progress.made()
        fused, angles, low, *matrices = ctx.saved_tensors
        matrices, weights = matrices[:3], matrices[3:]
        by_fused = gradient_of(gradients, fused, angles, weights, *ctx.settings)
        by_low, *by_matrices = update_gradients(by_fused, low, ctx.places, matrices, ctx.settings[1])
        return by_fused, None, None, None, None, by_low, None, *by_matrices


def _launch(
    fused: torch.Tensor, angles: torch.Tensor, weights: Any, parts: Triple, settings: tuple[float, HeadLayout],
    products: Any, keeps: bool,
) -> None:  # fmt: skip
    (eps, heads), tokens, half = settings, fused.shape[0], settings[1].head_dim // 2
    ranks, rows = tuple(rank for _, rank in products), triton.cdiv(tokens, ROWS)
    # Groups of one program: a divisor of all, as large as leaves enough programs.
    groups = max(n for n in range(1, heads.groups + 1) if not heads.groups % n and _enough(rows, heads.groups // n, n))
    _prepare[(rows, heads.groups // groups)](
        fused, angles, *(weights or (fused, fused)), *parts, eps, tokens, *(tuple(one) for one, _ in products),
        RANKS=ranks, BLOCKS=tuple(map(rank_block, ranks)), GROUPS=heads.groups, QUERIES=heads.queries, HALF=half,
        NORM=bool(weights), KEEPS=keeps, OWN=groups, BLOCK=triton.next_power_of_2(half), ROWS=ROWS, num_warps=WARPS,
    )  # fmt: skip


def _enough(rows: int, programs: int, groups: int) -> bool:
    """Return True if so many programs for each block of rows are enough, or there cannot be more."""
    return rows * programs >= PROGRAMS or groups == 1


@triton.jit
def _prepare(
    fused, angles, query_weight, key_weight, query, key, value, eps, tokens, of_query, of_key, of_value,
    RANKS: tl.constexpr, BLOCKS: tl.constexpr, GROUPS: tl.constexpr, QUERIES: tl.constexpr, HALF: tl.constexpr,
    NORM: tl.constexpr, KEEPS: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK).to(tl.int64)
    inside = (row < tokens)[:, None] & (column < HALF)[None, :]
    angle = tl.load(angles + row[:, None] * 2 * HALF + column[None, :], mask=inside, other=0.0)
    cos, sin = cos_sin(angle)
    query_low = _low(of_query, row, tokens, RANKS[0], BLOCKS[0])
    key_low = _low(of_key, row, tokens, RANKS[1], BLOCKS[1])
    value_low = _low(of_value, row, tokens, RANKS[2], BLOCKS[2])
    SLOTS: tl.constexpr = GROUPS * (QUERIES + 2)
    for group in range(tl.program_id(1) * OWN, (tl.program_id(1) + 1) * OWN):
        at = group * (QUERIES + 2)
        for head in range(group * QUERIES, (group + 1) * QUERIES):
            first, second = _read(
                fused, of_query, query_low, row, column, inside, at, head, SLOTS, HALF, KEEPS, RANKS[0], BLOCKS[0]
            )
            first, second = _normed(first, second, query_weight, column, eps, HALF, NORM)
            first, second = first * cos - second * sin, second * cos + first * sin
            _write(query, row, column, inside, head, GROUPS * QUERIES, HALF, first, second)
            at += 1
        first, second = _read(
            fused, of_key, key_low, row, column, inside, at, group, SLOTS, HALF, KEEPS, RANKS[1], BLOCKS[1]
        )
        first, second = _normed(first, second, key_weight, column, eps, HALF, NORM)
        first, second = first * cos - second * sin, second * cos + first * sin
        _write(key, row, column, inside, group, GROUPS, HALF, first, second)
        at += 1
        first, second = _read(
            fused, of_value, value_low, row, column, inside, at, group, SLOTS, HALF, False, RANKS[2], BLOCKS[2]
        )
        _write(value, row, column, inside, group, GROUPS, HALF, first, second)


@triton.jit
def _read(
    fused, factors, low, row, column, inside, slot, head, SLOTS: tl.constexpr, HALF: tl.constexpr,
    KEEPS: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return both halves of a head with the update, float32. ``head`` is its number among those of its kind."""
    place = fused + (row[:, None] * SLOTS + slot) * 2 * HALF + column[None, :]
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    if RANK > 0:
        matrix, scale = factors[1] + head * 2 * HALF * RANK, factors[2]
        first += low_rank_product(low, matrix, scale, column, HALF, 1, RANK, RANK, BLOCK)
        second += low_rank_product(low, matrix + HALF * RANK, scale, column, HALF, 1, RANK, RANK, BLOCK)
        if KEEPS:
            _write(fused, row, column, inside, slot, SLOTS, HALF, first, second)
    return first, second


@triton.jit
def _low(factors, row, tokens, RANK: tl.constexpr, BLOCK: tl.constexpr):
    return low_rows(factors[0], factors[3], row, tl.arange(0, BLOCK), tokens, RANK) if RANK > 0 else 0.0


@triton.jit
def _normed(first, second, weight, column, eps, HALF: tl.constexpr, NORM: tl.constexpr):
    if NORM:
        scale = tl.rsqrt(tl.sum(first * first + second * second, 1) / (2 * HALF) + eps)[:, None]
        first *= scale * tl.load(weight + column, mask=column < HALF, other=0.0).to(tl.float32)[None, :]
        second *= scale * tl.load(weight + HALF + column, mask=column < HALF, other=0.0).to(tl.float32)[None, :]
    return first, second


@triton.jit
def _write(out, row, column, inside, head, HEADS: tl.constexpr, HALF: tl.constexpr, first, second):
    place = out + (row[:, None] * HEADS + head) * 2 * HALF + column[None, :]
    tl.store(place, first.to(out.dtype.element_ty), mask=inside)
    tl.store(place + HALF, second.to(out.dtype.element_ty), mask=inside)
