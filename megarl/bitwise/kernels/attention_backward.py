# SPDX-License-Identifier: Apache-2.0
"""Gradient of packed causal attention, without atomic additions: two runs give the same bits.

One kernel walks the keys of a few queries for the queries' gradient, another one the queries of a few keys for the
keys' and values' (Dao, arXiv:2307.08691, algorithm 2, split in two). Both recompute the probabilities from the
logsumexp that the forward pass kept. Shape letters are those of ``attention``.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from megarl.bitwise.kernels.attention import LOG2_E, find_sequence
from megarl.bitwise.kernels.launch import aligned


class Blocks(NamedTuple):
    """Sizes of one kernel's tiles, and launch options. They change bits of gradients, and of no logprob.

    Attributes:
        rows: queries times heads of a KV head.
        keys: of a tile.
        warps, stages: of Triton.
    """

    rows: int
    keys: int
    warps: int
    stages: int


BY_QUERY, BY_KEY = Blocks(64, 64, 8, 2), Blocks(64, 64, 8, 2)
# Loads each key half as often; tests/gpu/bitwise_attention.py measures it. For heads of 128 features on Hopper it takes
# 209 registers a thread instead of 151, and 128 KiB instead of 96, so that a processor holds one block instead of two.
# ``BY_KEY`` takes 254 registers. With 128 keys a tile it would spill, also with 16 warps, 32 rows or one stage.
LARGE_BY_QUERY = Blocks(128, 64, 8, 2)


def attend_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    bounds: torch.Tensor,
    scale: float,
    blocks: tuple[Blocks, Blocks] = (BY_QUERY, BY_KEY),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value.

    Args:
        gradient, out: ``[T, N, D]``, of and from the forward pass.
        query: ``[T, N, D]``.
        key, value: ``[T, G, D]``.
        sums: float32 ``[N, T]``, the second result of ``attend``.
        bounds: int32 ``[S + 1]``, first token of each sequence, then T.
        scale: factor of the logits.
        blocks: of the kernel for queries, and of the one for keys and values.
    """
    gradient, query, key, value = (aligned(tensor) for tensor in (gradient, query, key, value))
    tokens, heads, width = query.shape
    groups, sequences = key.shape[1], len(bounds) - 1
    padded = triton.next_power_of_2(heads // groups)
    by_query, by_key, by_value = (
        torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (query, key, value)
    )  # fmt: skip
    along = (gradient.float() * out.float()).sum(-1).t().contiguous()
    given = (query, key, value, gradient, sums, along, bounds, tokens, sequences, scale * LOG2_E, scale)
    strides = [stride for t in (query, key, value, gradient) for stride in t.stride()[:2]]
    fixed = {
        "QUERIES": heads // groups,
        "PADDED": padded,
        "WIDTH": width,
        "BLOCK": triton.next_power_of_2(width),
    }
    queries, keys = (
        fixed | {"ROWS": b.rows, "TILE": b.keys, "num_warps": b.warps, "num_stages": b.stages} for b in blocks
    )
    if tokens:
        _by_query[(tokens // (blocks[0].rows // padded) + sequences, groups)](*given, *strides, by_query, **queries)
        _by_key[(tokens // blocks[1].keys + sequences, groups)](*given, *strides, by_key, by_value, **keys)
    return by_query, by_key, by_value


@triton.jit
def _rows(
    query, gradient, sums, along, first, begin, queries, tokens, group, query_token, query_head, gradient_token,
    gradient_head, QUERIES: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Load a tile of rows: positions, places, queries, gradients, logsumexp, and gradients times outputs."""
    row, feature = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    at, head = begin + row // PADDED, group * QUERIES + row % PADDED
    real = (at < queries) & (row % PADDED < QUERIES)
    token = (first + at).to(tl.int64)
    mask = real[:, None] & (feature < WIDTH)[None, :]
    of_query = query + token[:, None] * query_token + head[:, None] * query_head + feature[None, :]
    of_gradient = gradient + token[:, None] * gradient_token + head[:, None] * gradient_head + feature[None, :]
    rows, slopes = tl.load(of_query, mask=mask, other=0.0), tl.load(of_gradient, mask=mask, other=0.0)
    of_row = head.to(tl.int64) * tokens + token
    logsumexp = tl.load(sums + of_row, mask=real, other=0.0)
    return at, of_row, real, token, head, rows, slopes, logsumexp, tl.load(along + of_row, mask=real, other=0.0)


@triton.jit(do_not_specialize=["tokens", "sequences"])
def _by_query(
    query, key, value, gradient, sums, along, bounds, tokens, sequences, scale, plain_scale, query_token, query_head,
    key_token, key_head, value_token, value_head, gradient_token, gradient_head, by_query, QUERIES: tl.constexpr,
    PADDED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tile, group = tl.program_id(0), tl.program_id(1)
    sequence = find_sequence(bounds, tile, sequences, ROWS // PADDED)
    first = tl.load(bounds + sequence)
    length = tl.load(bounds + sequence + 1) - first
    begin = (tile - (first // (ROWS // PADDED) + sequence)) * (ROWS // PADDED)
    if begin < length:
        at, _, real, token, head, rows, slopes, logsumexp, middle = _rows(
            query, gradient, sums, along, first, begin, length, tokens, group, query_token, query_head, gradient_token,
            gradient_head, QUERIES, PADDED, WIDTH, BLOCK, ROWS,
        )  # fmt: skip
        within, feature = tl.arange(0, TILE), tl.arange(0, BLOCK)
        wide = (feature < WIDTH)[None, :]
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        for start in range(0, tl.minimum(begin + ROWS // PADDED, length), TILE):
            held = (start + within < length)[:, None] & wide
            place = (first + start + within).to(tl.int64)[:, None]
            keys = tl.load(key + place * key_token + group * key_head + feature[None, :], mask=held, other=0.0)
            values = tl.load(value + place * value_token + group * value_head + feature[None, :], mask=held, other=0.0)
            logits = tl.dot(rows, tl.trans(keys), input_precision="ieee") * scale
            seen = (start + within)[None, :] <= at[:, None]
            powers = tl.where(seen, tl.exp2(logits - logsumexp[:, None]), 0.0)
            by_power = tl.dot(slopes, tl.trans(values), input_precision="ieee")
            by_logit = powers * (by_power - middle[:, None])
            total = tl.dot(by_logit.to(keys.dtype), keys, total, input_precision="ieee")
        out = by_query + (token * tl.num_programs(1) * QUERIES + head)[:, None] * WIDTH + feature[None, :]
        tl.store(out, (total * plain_scale).to(by_query.dtype.element_ty), mask=real[:, None] & wide)


@triton.jit(do_not_specialize=["tokens", "sequences"])
def _by_key(
    query, key, value, gradient, sums, along, bounds, tokens, sequences, scale, plain_scale, query_token, query_head,
    key_token, key_head, value_token, value_head, gradient_token, gradient_head, by_key, by_value,
    QUERIES: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    tile, group = tl.program_id(0), tl.program_id(1)
    sequence = find_sequence(bounds, tile, sequences, TILE)
    first = tl.load(bounds + sequence)
    length = tl.load(bounds + sequence + 1) - first
    start = (tile - (first // TILE + sequence)) * TILE
    if start < length:
        within, feature = tl.arange(0, TILE), tl.arange(0, BLOCK)
        held = (start + within < length)[:, None] & (feature < WIDTH)[None, :]
        place = (first + start + within).to(tl.int64)[:, None]
        keys = tl.load(key + place * key_token + group * key_head + feature[None, :], mask=held, other=0.0)
        values = tl.load(value + place * value_token + group * value_head + feature[None, :], mask=held, other=0.0)
        of_keys = tl.zeros((TILE, BLOCK), tl.float32)
        of_values = tl.zeros((TILE, BLOCK), tl.float32)
        # The first tile of queries that sees any of these keys.
        for begin in range(start // (ROWS // PADDED) * (ROWS // PADDED), length, ROWS // PADDED):
            at, _, real, _, _, rows, slopes, logsumexp, middle = _rows(
                query, gradient, sums, along, first, begin, length, tokens, group, query_token, query_head,
                gradient_token, gradient_head, QUERIES, PADDED, WIDTH, BLOCK, ROWS,
            )  # fmt: skip
            logits = tl.dot(rows, tl.trans(keys), input_precision="ieee") * scale
            seen = real[:, None] & ((start + within)[None, :] <= at[:, None])
            powers = tl.where(seen, tl.exp2(logits - logsumexp[:, None]), 0.0)
            of_values = tl.dot(tl.trans(powers.to(slopes.dtype)), slopes, of_values, input_precision="ieee")
            by_power = tl.dot(slopes, tl.trans(values), input_precision="ieee")
            by_logit = powers * (by_power - middle[:, None])
            of_keys = tl.dot(tl.trans(by_logit.to(rows.dtype)), rows, of_keys, input_precision="ieee")
        out = (place * tl.num_programs(1) + group) * WIDTH + feature[None, :]
        tl.store(by_key + out, (of_keys * plain_scale).to(by_key.dtype.element_ty), mask=held)
        tl.store(by_value + out, of_values.to(by_value.dtype.element_ty), mask=held)
