# SPDX-License-Identifier: Apache-2.0
"""Form the gradients of an update's ``low`` and of every B while the wide gradient is read once, for low ranks.

Products of their own read the gradient of the linear's output twice. Those of low ranks are narrow, which is what
matrix kernels are slow at, and the parts of queries, keys and values have to be brought together and taken apart again.

Shape letters: T tokens, O output features of the linear, R columns of ``low``, r rank of a part, P parts (at most 3).
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from megarl.model.layers.kernels import chunk_sums
from megarl.model.layers.kernels.chunk_sums import share_tokens, sum_columns
from megarl.model.layers.kernels.low_rank import LEAST, low_rows, rank_block
from megarl.model.layers.kernels.rows import as_rows
from megarl.model.weights.fusion import HeadLayout
from megarl.triton_support import ceil_div, power_of_two
from megarl.triton_support.quick_launch import QuickKernel

# Tile of a step of one program.
ROWS, COLUMNS, WARPS, STAGES = 64, 128, 4, 3
# Highest rank. Each program writes the gradients of ``low`` that its features give: with the rank that grows, and what
# is read once less does not.
MOST = 32
# Such tiles of one program, if every part has a multiple of so many: what it finds of ``low`` is written once for all.
PIECES = 1
# Programs to launch: enough for every multiprocessor of a GPU to have two.
PROGRAMS = 264
# Elements that a program adds up of the gradient of ``low``.
LOW_TILE = 1024
# Parts that the kernels have arguments for.
PARTS = 3


class Places(NamedTuple):
    """Places of the parts' output features, in units that are equally wide.

    Attributes:
        unit: features of a unit, which lie together.
        units: units of each part.
        runs: units of each part that lie together.
        stride: features from one run of a part to its next.
        offsets: first feature of each part.
    """

    unit: int
    units: tuple[int, ...]
    runs: tuple[int, ...]
    stride: int
    offsets: tuple[int, ...]


def takes(matrices: Sequence[torch.Tensor | None]) -> bool:
    """Return True if the kernel is worth it for all of the matrices B, ``[O of the part, r]``."""
    return max(0 if matrix is None else matrix.shape[1] for matrix in matrices) <= MOST


def narrow_gradients(
    by_out: torch.Tensor,
    low: torch.Tensor,
    places: Sequence[Any],
    matrices: Sequence[torch.Tensor | None],
    heads: HeadLayout | None,
    into: torch.Tensor,
) -> tuple[torch.Tensor | None, ...]:
    """Return what ``updates.update_gradients`` does; parts may share columns of ``low``. Each is rounded once."""
    rows, narrow = as_rows(by_out), as_rows(low)
    ranks = tuple(0 if matrix is None else matrix.shape[1] for matrix in matrices)
    tokens, width = rows.shape
    settings = _settings(width, ranks, tuple(place[0] if place else 0 for place in places), heads)
    # What each program has for its tokens and features, and for its features and tokens.
    blocks, most = settings["FIRST"][-1], settings["MOST"]
    own, programs = share_tokens(tokens, PROGRAMS // blocks, ROWS)
    lows = rows.new_empty(blocks, tokens, most, dtype=torch.float32)
    sums = rows.new_empty(programs, settings["STARTS"][-1], dtype=torch.float32)
    given = [rows if matrix is None else matrix.contiguous() for matrix in matrices] + [rows] * (PARTS - len(matrices))
    scales = [place[1] if place else 0.0 for place in places] + [0.0] * (PARTS - len(places))
    _gradients[(programs, blocks)](
        rows, narrow, lows, sums, tokens, own, rows.stride(0), narrow.stride(0), *given, *scales, **settings
    )
    by_matrices = _add_up(lows, sums, settings, into)
    pieces = by_matrices.tensor_split(settings["STARTS"][1 : len(ranks)])
    return into, *(piece.view(-1, rank) if rank else None for piece, rank in zip(pieces, ranks, strict=True))


def _add_up(lows: torch.Tensor, sums: torch.Tensor, settings: dict[str, Any], by_low: torch.Tensor) -> torch.Tensor:
    """Write the gradient of ``low``; return those of all matrices one after the other, flat.

    Args:
        lows, sums: what the programs found for their features and tokens, ``[blocks, T, highest rank]`` and
            ``[programs, N]``, float32.
        settings: see ``_settings``.
        by_low: memory for the first, ``[..., R]``.
    """
    tokens, (programs, width) = lows.shape[1], sums.shape
    narrow = by_low if by_low.dim() == 2 else by_low.view(tokens, -1)
    by_matrices, columns = by_low.new_empty(width), narrow.shape[1]
    block = power_of_two(columns)
    few = max(1, LOW_TILE // block)
    of_low = ceil_div(tokens, few)
    _sum[(of_low + ceil_div(width, chunk_sums.COLUMNS),)](
        lows, narrow, tokens, columns, narrow.stride(0), sums, by_matrices, programs, width, of_low,
        RANKS=settings["RANKS"], LOWS=settings["LOWS"], FIRST=settings["FIRST"], MOST=settings["MOST"], ROWS=few,
        COLUMNS=block, CHUNK_ROWS=chunk_sums.ROWS, CHUNK_COLUMNS=chunk_sums.COLUMNS, num_warps=chunk_sums.WARPS,
    )  # fmt: skip
    return by_matrices


def _by_heads(heads: HeadLayout) -> Places:
    """Return the places of queries, keys and values."""
    groups, queries, size = heads.groups, heads.queries, heads.head_dim
    runs, offsets = (queries, 1, 1), (0, queries * size, (queries + 1) * size)
    return Places(size, tuple(groups * run for run in runs), runs, (queries + 2) * size, offsets)


def _side_by_side(width: int, count: int) -> Places:
    unit = width // count
    return Places(unit, (1,) * count, (1,) * count, width, tuple(unit * part for part in range(count)))


@cache
def _settings(width: int, ranks: tuple[int, ...], lows: tuple[int, ...], heads: HeadLayout | None) -> dict[str, Any]:
    """Return what the first kernel knows of ``width`` features and the parts when it is compiled.

    ``FIRST`` and ``STARTS`` have a number more than there are parts: where the next one's programs and sums would
    begin.
    """
    where = _by_heads(heads) if heads is not None else _side_by_side(width, len(ranks))
    columns = max(LEAST, min(COLUMNS, power_of_two(where.unit)))
    split, absent = ceil_div(where.unit, columns), [0] * (PARTS - len(ranks))
    blocks = [units * split if rank else 0 for units, rank in zip(where.units, ranks, strict=True)]
    pieces = gcd(PIECES, *blocks)
    sizes, most = [units * where.unit * rank for units, rank in zip(where.units, ranks, strict=True)], max(ranks)
    return {
        "RANKS": (*ranks, *absent),
        "LOWS": (*lows, *absent),
        "FIRST": tuple(accumulate([*(block // pieces for block in blocks), *absent], initial=0)),
        "STARTS": tuple(accumulate([*sizes, *absent], initial=0)),
        "RUNS": (*where.runs, *[1 for _ in absent]),
        "OFFSETS": (*where.offsets, *absent),
        "MOST": most,
        "BLOCK": rank_block(most),
        "UNIT": where.unit,
        "STRIDE": where.stride,
        "SPLIT": split,
        "PIECES": pieces,
        "ALIGNED": gcd(16, *lows),
        "ROWS": ROWS,
        "COLUMNS": columns,
        "num_warps": WARPS,
        "num_stages": STAGES,
    }


@QuickKernel
@triton.jit
def _gradients(
    wide, low, lows, sums, tokens, own, stride, low_stride, first, second, third, first_scale, second_scale,
    third_scale, RANKS: tl.constexpr, LOWS: tl.constexpr, FIRST: tl.constexpr, STARTS: tl.constexpr,
    RUNS: tl.constexpr, OFFSETS: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr,
    STRIDE: tl.constexpr, SPLIT: tl.constexpr, PIECES: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute ``PIECES`` times ``COLUMNS`` features of a part for ``own`` tokens."""
    block = tl.program_id(1)
    # What belongs to the block's part.
    matrix = _chosen(block, FIRST, first, second, third)
    scale = _chosen(block, FIRST, first_scale, second_scale, third_scale)
    rank = _chosen(block, FIRST, RANKS[0], RANKS[1], RANKS[2])
    run = _chosen(block, FIRST, RUNS[0], RUNS[1], RUNS[2])
    offset = _chosen(block, FIRST, OFFSETS[0], OFFSETS[1], OFFSETS[2])
    within = block - _chosen(block, FIRST, FIRST[0], FIRST[1], FIRST[2])
    low += tl.multiple_of(_chosen(block, FIRST, LOWS[0], LOWS[1], LOWS[2]), ALIGNED)
    sums += tl.program_id(0).to(tl.int64) * STARTS[3] + _chosen(block, FIRST, STARTS[0], STARTS[1], STARTS[2])
    lows += block.to(tl.int64) * tokens * MOST

    k = tl.arange(0, BLOCK)
    held, factors = k < rank, ()
    for piece in tl.static_range(PIECES):
        _, feature, of_unit = _features(within * PIECES + piece, run, offset, UNIT, STRIDE, SPLIT, COLUMNS)
        of_matrix = of_unit[:, None] & held[None, :]
        factor = tl.load(matrix + feature[:, None] * rank + k[None, :], mask=of_matrix, other=0.0)
        factors += (factor,)  # type: ignore[assignment]
    by_matrices = (tl.zeros((COLUMNS, BLOCK), tl.float32),) * PIECES
    begin = tl.program_id(0).to(tl.int64) * own
    for start in range(0, own, ROWS):
        row = begin + start + tl.arange(0, ROWS)
        there = row < tokens
        below = low_rows(low, low_stride, row, k, tokens, rank)
        by_low, summed = tl.zeros((ROWS, BLOCK), tl.float32), ()
        for piece in tl.static_range(PIECES):
            column, _, of_unit = _features(within * PIECES + piece, run, offset, UNIT, STRIDE, SPLIT, COLUMNS)
            inside = there[:, None] & of_unit[None, :]
            tile = tl.load(wide + row[:, None] * stride + column[None, :], mask=inside, other=0.0)
            by_low = tl.dot(tile, factors[piece], by_low, input_precision="ieee")
            by_matrix = tl.dot(tl.trans(tile), below, by_matrices[piece], input_precision="ieee")
            summed += (by_matrix,)  # type: ignore[assignment]
        by_matrices = summed
        tl.store(lows + row[:, None] * MOST + k[None, :], scale * by_low, mask=there[:, None] & held[None, :])
    for piece in tl.static_range(PIECES):
        _, feature, of_unit = _features(within * PIECES + piece, run, offset, UNIT, STRIDE, SPLIT, COLUMNS)
        target = sums + feature[:, None] * rank + k[None, :]
        tl.store(target, scale * by_matrices[piece], mask=of_unit[:, None] & held[None, :])


@triton.jit
def _features(
    piece, run, offset, UNIT: tl.constexpr, STRIDE: tl.constexpr, SPLIT: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Return a piece's columns of the wide gradient, the rows of B for them, and which of them there are."""
    unit, within = piece // SPLIT, piece % SPLIT * COLUMNS + tl.arange(0, COLUMNS)
    return (unit // run) * STRIDE + offset + (unit % run) * UNIT + within, unit * UNIT + within, within < UNIT


@triton.jit
def _chosen(block, FIRST: tl.constexpr, of_first, of_second, of_third):
    """Return what belongs to the part of a block."""
    return tl.where(block < FIRST[1], of_first, tl.where(block < FIRST[2], of_second, of_third))


@QuickKernel
@triton.jit
def _sum(
    lows, by_low, tokens, columns, stride, sums, by_matrices, programs, width, of_low, RANKS: tl.constexpr,
    LOWS: tl.constexpr, FIRST: tl.constexpr, MOST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    CHUNK_ROWS: tl.constexpr, CHUNK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add up what the programs of ``_gradients`` found. The first ``of_low`` programs do it for ``low``."""
    program = tl.program_id(0)
    if program < of_low:
        _sum_low(lows, by_low, program, tokens, columns, stride, RANKS, LOWS, FIRST, MOST, ROWS, COLUMNS)
    else:
        sum_columns(sums, by_matrices, program - of_low, programs, width, CHUNK_ROWS, CHUNK_COLUMNS)


@triton.jit
def _sum_low(
    lows, by_low, block, tokens, columns, stride, RANKS: tl.constexpr, LOWS: tl.constexpr, FIRST: tl.constexpr,
    MOST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add up the gradient of ``low`` of some tokens. Parts may share columns."""
    row = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    total = _added(total, lows, row, column - LOWS[0], tokens, FIRST[0], FIRST[1], RANKS[0], MOST)
    total = _added(total, lows, row, column - LOWS[1], tokens, FIRST[1], FIRST[2], RANKS[1], MOST)
    total = _added(total, lows, row, column - LOWS[2], tokens, FIRST[2], FIRST[3], RANKS[2], MOST)
    inside = (row < tokens)[:, None] & (column < columns)[None, :]
    tl.store(by_low + row[:, None] * stride + column[None, :], total.to(by_low.dtype.element_ty), mask=inside)


@triton.jit
def _added(total, lows, row, k, tokens, first, last, RANK: tl.constexpr, MOST: tl.constexpr):
    if RANK > 0:
        inside = (row < tokens)[:, None] & ((k >= 0) & (k < RANK))[None, :]
        # Unrolled, so that the loads of several blocks are on their way at once.
        for block in tl.range(first, last, loop_unroll_factor=8):
            place = lows + (tokens * block + row[:, None]) * MOST + k[None, :]
            total += tl.load(place, mask=inside, other=0.0)
    return total
