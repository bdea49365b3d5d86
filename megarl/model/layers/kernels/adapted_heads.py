# SPDX-License-Identifier: Apache-2.0
"""Turn the fused q, k and v projection into attention's inputs, and add its adapter's update on the way.

The forward pass does what ``heads`` does, in tiles of tokens, because a low-rank product of one token alone would read
all of B. The backward pass is that of ``heads``.

Shape letters: T tokens, G groups (KV heads), N query heads of a group, D head_dim.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from megarl import progress
from megarl.model.layers.kernels.heads import empty_parts, gradient_of
from megarl.model.layers.kernels.low_rank import factors_of, low_rank_product, low_rows, rank_block
from megarl.model.layers.updates import Update, flattened, update_gradients, with_room
from megarl.model.weights.fusion import HeadLayout
from megarl.triton_support import ceil_div, power_of_two
from megarl.triton_support.fast_math import cos_sin
from megarl.triton_support.quick_launch import QuickKernel

# Tokens of one program. It computes their angles once, and all heads of some groups.
ROWS, WARPS, STAGES = 16, 1, 2
# Programs to launch at least, if the heads allow: enough for every multiprocessor of a GPU to have several.
PROGRAMS = 2048
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
    return AdaptedHeads.apply(fused, angles, weights, eps, heads, *flattened(update, 3))


class AdaptedHeads(torch.autograd.Function):
    """``prepare_adapted_heads`` as autograd takes it, its update ``flattened``."""

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
        wide, narrow = with_room(fused, low.shape[-1])
        eps, heads = ctx.settings
        by_fused = gradient_of(gradients, fused, angles, weights, eps, heads, wide)
        by_low, *by_matrices = update_gradients(by_fused, low, ctx.places, matrices, heads, narrow)
        return by_fused, None, None, None, None, by_low, None, *by_matrices


def _launch(
    fused: torch.Tensor, angles: torch.Tensor, weights: Any, parts: Triple, settings: tuple[float, HeadLayout],
    products: Any, keeps: bool,
) -> None:  # fmt: skip
    (eps, heads), tokens, half = settings, fused.shape[0], settings[1].head_dim // 2
    ranks, rows = tuple(rank for _, rank in products), ceil_div(tokens, ROWS)
    groups = _groups_of_a_program(heads.groups, rows)
    _prepare[(rows, heads.groups // groups)](
        fused, angles, *(weights or (fused, fused)), *parts, eps, tokens, *(tuple(one) for one, _ in products),
        RANKS=ranks, SAME=len(set(ranks)) == 1, RANK_BLOCK=rank_block(max(ranks)), GROUPS=heads.groups,
        QUERIES=heads.queries, HALF=half, NORM=bool(weights), KEEPS=keeps, OWN=groups,
        BLOCK=power_of_two(half), ROWS=ROWS, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip


@cache
def _groups_of_a_program(groups: int, rows: int) -> int:
    """Return a divisor of all groups, as large as leaves enough programs for so many blocks of rows."""
    return max(n for n in range(1, groups + 1) if not groups % n and (rows * groups // n >= PROGRAMS or n == 1))


@QuickKernel
@triton.jit
def _prepare(
    fused, angles, query_weight, key_weight, query, key, value, eps, tokens, of_query, of_key, of_value,
    RANKS: tl.constexpr, SAME: tl.constexpr, RANK_BLOCK: tl.constexpr, GROUPS: tl.constexpr, QUERIES: tl.constexpr,
    HALF: tl.constexpr, NORM: tl.constexpr, KEEPS: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK).to(tl.int64)
    inside = (row < tokens)[:, None] & (column < HALF)[None, :]
    angle = tl.load(angles + row[:, None] * 2 * HALF + column[None, :], mask=inside, other=0.0)
    cos, sin = cos_sin(angle)
    k = tl.arange(0, RANK_BLOCK)
    low_of_query = low_rows(of_query[0], of_query[3], row, k, tokens, RANKS[0])
    low_of_key = low_rows(of_key[0], of_key[3], row, k, tokens, RANKS[1])
    low_of_value = low_rows(of_value[0], of_value[3], row, k, tokens, RANKS[2])
    SLOTS: tl.constexpr = OWN * (QUERIES + 2)
    begin = tl.program_id(1) * SLOTS
    states = fused + row[:, None] * GROUPS * (QUERIES + 2) * 2 * HALF + column[None, :]
    next_first, next_second = _load(states + begin * 2 * HALF, inside, HALF)
    # One loop for heads of all kinds: the next head's states are on their way while this one is computed.
    for slot in range(begin, begin + SLOTS):
        first, second = next_first.to(tl.float32), next_second.to(tl.float32)
        following = tl.minimum(slot + 1, begin + SLOTS - 1)
        next_first, next_second = _load(states + following * 2 * HALF, inside, HALF)
        group, within = slot // (QUERIES + 2), slot % (QUERIES + 2)
        is_query, is_value = within < QUERIES, within == QUERIES + 1
        head = tl.where(is_query, group * QUERIES + within, group)
        low = _of_kind(is_query, is_value, low_of_query, low_of_key, low_of_value)
        scale = _of_kind(is_query, is_value, of_query[2], of_key[2], of_value[2])
        rank = RANKS[0] if SAME else _of_kind(is_query, is_value, RANKS[0], RANKS[1], RANKS[2])
        matrix = _of_kind(is_query, is_value, of_query[1], of_key[1], of_value[1]) + head * 2 * HALF * rank
        first += low_rank_product(low, matrix, scale, column, HALF, 1, rank, rank, RANK_BLOCK)
        second += low_rank_product(low, matrix + HALF * rank, scale, column, HALF, 1, rank, rank, RANK_BLOCK)
        if KEEPS:  # noqa: SIM102 (known when the kernel is compiled)
            if not is_value:
                _store(states + slot * 2 * HALF, inside, HALF, first, second)
        if NORM:
            weight = tl.where(is_query, query_weight, key_weight)
            first, second = _normed(first, second, weight, is_value, column, eps, HALF)
        turned = first * cos - second * sin
        second = tl.where(is_value, second, second * cos + first * sin)
        first = tl.where(is_value, first, turned)
        out, heads = _of_kind(is_query, is_value, query, key, value), tl.where(is_query, GROUPS * QUERIES, GROUPS)
        _store(out + (row[:, None] * heads + head) * 2 * HALF + column[None, :], inside, HALF, first, second)


@triton.jit
def _of_kind(is_query, is_value, of_query, of_key, of_value):
    return tl.where(is_query, of_query, tl.where(is_value, of_value, of_key))


@triton.jit
def _load(place, inside, HALF: tl.constexpr):
    return tl.load(place, mask=inside, other=0.0), tl.load(place + HALF, mask=inside, other=0.0)


@triton.jit
def _store(place, inside, HALF: tl.constexpr, first, second):
    tl.store(place, first.to(place.dtype.element_ty), mask=inside)
    tl.store(place + HALF, second.to(place.dtype.element_ty), mask=inside)


@triton.jit
def _normed(first, second, weight, is_value, column, eps, HALF: tl.constexpr):
    """Return both halves of a head behind its norm; a value has none."""
    root = tl.rsqrt(tl.sum(first * first + second * second, 1) / (2 * HALF) + eps)
    root = tl.where(is_value, 1.0, root)[:, None]
    of_first = tl.load(weight + column, mask=column < HALF, other=0.0).to(tl.float32)
    of_second = tl.load(weight + HALF + column, mask=column < HALF, other=0.0).to(tl.float32)
    first *= root * tl.where(is_value, 1.0, of_first)[None, :]
    second *= root * tl.where(is_value, 1.0, of_second)[None, :]
    return first, second
