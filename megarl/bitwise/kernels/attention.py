# SPDX-License-Identifier: Apache-2.0
"""Causal attention over keys in pages: the sampler's cache, or the trainer's packed tokens seen as such.

A program computes the rows of one KV head for a few neighbouring queries, and walks the keys in tiles of ``TILE`` from
the sequence's first on. A tile whose keys are all hidden from a row changes no bit of it: the row's maximum stays, its
sum and its output are multiplied by 1, and zeros are added. So neither the queries that share a program, nor the
chunks of a prefill, nor the sequences of a batch change a row.

Shape letters: T queries, N query heads, G KV heads, D head_dim, S sequences, P pages of a sequence.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from megarl.bitwise.kernels.launch import UNFUSED, aligned
from megarl.triton_support import power_of_two

ROWS, TILE = 64, 64
WARPS, STAGES = 4, 3
LOG2_E = 1.4426950408889634


class Pages(NamedTuple):
    """Keys and values in pages of ``size`` tokens, a multiple of ``TILE``.

    Attributes:
        key, value: the memory; the features of a head lie side by side.
        key_strides, value_strides: elements from one page, token and head to the next.
        groups: G.
        table: int32 ``[S, P]``: the pages of each sequence, in order.
        lengths: int32 ``[S]``: number of each sequence's keys, the new ones included.
        size: tokens of a page.
    """

    key: torch.Tensor
    value: torch.Tensor
    key_strides: tuple[int, ...]
    value_strides: tuple[int, ...]
    groups: int
    table: torch.Tensor
    lengths: torch.Tensor
    size: int


def packed_pages(key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, longest: int) -> Pages:
    """See packed keys and values as pages. A "page" begins at any token, so that a sequence may begin anywhere.

    Args:
        key, value: ``[T, G, D]``, last dimension contiguous.
        bounds: int32 ``[S + 1]``, first token of each sequence, then T.
        longest: upper bound of the sequences' lengths.
    """
    steps = torch.arange(0, longest, TILE, dtype=torch.int32, device=bounds.device)
    table = bounds[:-1, None] + steps
    key, value = aligned(key), aligned(value)
    strides = [(t.stride(0), t.stride(0), t.stride(1)) for t in (key, value)]
    return Pages(key, value, strides[0], strides[1], key.shape[1], table, bounds.diff(), TILE)


def attend(
    query: torch.Tensor, pages: Pages, starts: torch.Tensor, scale: float, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend; the last query of a sequence sees all of its keys.

    Args:
        query: ``[T, N, D]``.
        pages: keys and values.
        starts: int32 ``[S + 1]``: first query of each sequence, then their number. Sequences may be empty.
        scale: factor of the logits.
        out: ``[T, N, D]`` to write to, contiguous.

    Returns:
        ``[T, N, D]``, and the base-2 logsumexp of each row, float32 ``[N, T]``.

    Raises:
        ValueError: the page size is not a multiple of ``TILE``.
    """
    if pages.size % TILE:
        raise ValueError(f"pages have {pages.size} tokens; numerics=bitwise needs a multiple of {TILE}")
    query = aligned(query)
    tokens, heads, width = query.shape
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    sums = torch.empty(heads, tokens, dtype=torch.float32, device=query.device)
    groups, sequences = pages.groups, len(starts) - 1
    padded = power_of_two(heads // groups)
    grid = (tokens // (ROWS // padded) + sequences, groups)
    if tokens:
        _attend[grid](
            query,
            pages.key,
            pages.value,
            out,
            sums,
            pages.table,
            starts,
            pages.lengths,
            tokens,
            sequences,
            pages.table.stride(0),
            scale * LOG2_E,
            *query.stride()[:2],
            *pages.key_strides,
            *pages.value_strides,
            *out.stride()[:2],
            SIZE=pages.size,
            QUERIES=heads // groups,
            PADDED=padded,
            WIDTH=width,
            BLOCK=power_of_two(width),
            ROWS=ROWS,
            TILE=TILE,
            num_warps=WARPS,
            num_stages=STAGES,
            **UNFUSED,
        )
    return out, sums


@triton.jit
def _find_sequence(starts, tile, sequences, TOKENS: tl.constexpr):
    """Return the sequence of a tile: sequence s has its tiles from ``starts[s] // TOKENS + s`` on."""
    left, right = 0, sequences
    while left < right:
        middle = (left + right) // 2
        if tl.load(starts + middle) // TOKENS + middle <= tile:
            left = middle + 1
        else:
            right = middle
    return left - 1


@triton.jit(do_not_specialize=["tokens", "sequences", "table_stride"])
def _attend(
    query, key, value, out, sums, table, starts, lengths, tokens, sequences, table_stride, scale,
    query_token, query_head, key_page, key_token, key_head, value_page, value_token, value_head, out_token, out_head,
    SIZE: tl.constexpr, QUERIES: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tile, group = tl.program_id(0), tl.program_id(1)
    sequence = _find_sequence(starts, tile, sequences, ROWS // PADDED)
    first = tl.load(starts + sequence)
    queries = tl.load(starts + sequence + 1) - first
    begin = (tile - (first // (ROWS // PADDED) + sequence)) * (ROWS // PADDED)
    if begin < queries:
        row = tl.arange(0, ROWS)
        at = begin + row // PADDED
        head = group * QUERIES + row % PADDED
        real = (at < queries) & (row % PADDED < QUERIES)
        length = tl.load(lengths + sequence)
        position = length - queries + at
        # Keys that any row of this tile sees.
        end = tl.minimum(length - queries + begin + ROWS // PADDED, length)
        feature = tl.arange(0, BLOCK)
        wide = (feature < WIDTH)[None, :]
        token = (first + at).to(tl.int64)
        rows = tl.load(
            query + token[:, None] * query_token + head[:, None] * query_head + feature[None, :],
            mask=real[:, None] & wide,
            other=0.0,
        )
        largest = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        sum_of_values = tl.zeros((ROWS, BLOCK), tl.float32)
        within = tl.arange(0, TILE)
        for start in range(0, end, TILE):
            page = tl.load(table + sequence * table_stride + start // SIZE).to(tl.int64)
            inside = start % SIZE + within
            held = (start + within < length)[:, None] & wide
            of_key = key + page * key_page + inside[:, None] * key_token + group * key_head + feature[None, :]
            of_value = value + page * value_page + inside[:, None] * value_token + group * value_head + feature[None, :]
            keys = tl.load(of_key, mask=held, other=0.0)
            logits = tl.dot(rows, tl.trans(keys), input_precision="ieee") * scale
            seen = (start + within)[None, :] <= position[:, None]
            logits = tl.where(seen, logits, float("-inf"))
            higher = tl.maximum(largest, tl.max(logits, 1))
            powers = tl.exp2(logits - higher[:, None])
            fall = tl.exp2(largest - higher)
            total = total * fall + tl.sum(powers, 1)
            values = tl.load(of_value, mask=held, other=0.0)
            sum_of_values = sum_of_values * fall[:, None]
            sum_of_values = tl.dot(powers.to(values.dtype), values, sum_of_values, input_precision="ieee")
            largest = higher
        result = sum_of_values / total[:, None]
        place = out + token[:, None] * out_token + head[:, None] * out_head + feature[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=real[:, None] & wide)
        tl.store(sums + head.to(tl.int64) * tokens + token, largest + tl.log2(total), mask=real)
