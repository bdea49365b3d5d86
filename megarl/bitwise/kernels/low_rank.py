# SPDX-License-Identifier: Apache-2.0
"""LoRA's two products for tokens of several adapters, which lie sorted by adapter in an index.

The sampler's batch mixes adapters, and the trainer's tokens all have the same one. Both pass the same index.
Shape letters: T tokens, K input features, N output features, r rank, L adapters.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from megarl.bitwise.kernels.launch import UNFUSED, aligned
from megarl.triton_support import ceil_div, power_of_two

ROWS, COLUMNS, LEAST = 64, 128, 16
SHRINK_ROWS, DEPTH = 32, 128
# Row blocks that a program of ``expand`` walks with one tile of B, where there are many rows.
BLOCKS, MANY = 4, 2048


class Tokens(NamedTuple):
    """The tokens of each adapter.

    Attributes:
        order: int32 ``[T]``: indices of tokens, those of an adapter side by side.
        counts, starts: int32 ``[groups]`` or longer: number of each group's tokens, and the first one's place in
            ``order``.
        adapters: int32 ``[groups]``: each group's adapter, -1 for none.
        groups: number of groups to look at.
    """

    order: torch.Tensor
    counts: torch.Tensor
    starts: torch.Tensor
    adapters: torch.Tensor
    groups: int


class Columns(NamedTuple):
    """Places of N features in a row of a wider tensor: runs of ``width``, one every ``period``, from ``start``.

    ``of(N, start)`` is one run.
    """

    width: int
    period: int
    start: int

    @classmethod
    def of(cls, width: int, start: int = 0) -> "Columns":
        """Return columns that lie side by side."""
        return cls(width, 0, start)


def all_tokens(count: int, device: torch.device) -> Tokens:
    """Return the index for tokens that all have adapter 0."""
    numbers = torch.zeros(3, dtype=torch.int32, device=device)
    numbers[:1].fill_(count)  # not copied from the host, so that a CUDA graph can hold it
    order = torch.arange(count, dtype=torch.int32, device=device)
    return Tokens(order, numbers[:1], numbers[1:2], numbers[2:], 1)


def shrink(inputs: torch.Tensor, matrices: torch.Tensor, tokens: Tokens, out: torch.Tensor) -> None:
    """Write ``inputs @ A.T`` of each token's adapter, summed in float32 and rounded once.

    Args:
        inputs: ``[T, K]``.
        matrices: every adapter's A, ``[L, r, K]``.
        tokens: the index. Rows of tokens without adapter are not written.
        out: ``[T, r]``.
    """
    inputs, matrices = aligned(inputs), aligned(matrices)
    rank, depth = matrices.shape[1:]
    grid = (ceil_div(len(tokens.order), SHRINK_ROWS), tokens.groups)
    if grid[0]:
        _shrink[grid](
            inputs,
            matrices,
            out,
            *tokens[:4],
            inputs.stride(0),
            matrices.stride(0),
            out.stride(0),
            RANK=rank,
            DEPTH=depth,
            ROWS=SHRINK_ROWS,
            PADDED=max(LEAST, power_of_two(rank)),
            TILE=DEPTH,
            num_warps=4,
            num_stages=4,
            **UNFUSED,
        )


def expand(
    low: torch.Tensor, matrices: torch.Tensor, tokens: Tokens, out: torch.Tensor, given: torch.Tensor, columns: Columns
) -> None:
    """Write ``given + low @ B.T`` of each token's adapter at the part's columns, summed in float32 and rounded once.

    Args:
        low: ``[T, r]``.
        matrices: every adapter's B, ``[L, N, r]``, already multiplied by the adapter's scaling.
        tokens: the index. Rows of tokens without adapter are not written.
        out: ``[T, W]``, contiguous.
        given: ``[T, W]``, contiguous; may be ``out``.
        columns: the places of the N features among the W columns; multiples of 16.

    Raises:
        ValueError: a column's place or a run's width is not a multiple of 16.
    """
    features, rank = matrices.shape[1:]
    if any(number % LEAST for number in (features, *columns)):
        raise ValueError(f"{features} features at {columns}; numerics=bitwise needs multiples of {LEAST}")
    tile = min(COLUMNS, columns.width & -columns.width)  # divides a run, so that a tile's columns lie side by side
    blocks = BLOCKS if len(tokens.order) >= MANY else 1
    grid = (ceil_div(len(tokens.order), ROWS * blocks) * ceil_div(features, tile), tokens.groups)
    if grid[0]:
        _expand[grid](
            low,
            matrices,
            out,
            given,
            *tokens[:4],
            low.stride(0),
            matrices.stride(0),
            matrices.stride(1),
            out.stride(0),
            *columns,
            FEATURES=features,
            RANK=rank,
            ROWS=ROWS,
            COLUMNS=tile,
            BLOCKS=blocks,
            PADDED=max(LEAST, power_of_two(rank)),
            num_warps=4,
            num_stages=2,
            **UNFUSED,
        )


@triton.jit
def _rows_of(order, counts, starts, group, tile, ROWS: tl.constexpr):
    """Return a tile's tokens, and which of them are real; the others repeat the tile's first."""
    within = tl.arange(0, ROWS)
    left = tl.load(counts + group) - tile * ROWS
    place = order + tl.load(starts + group) + tile * ROWS + tl.where(within < left, within, 0)
    return tl.load(place).to(tl.int64), within < left


@triton.jit(do_not_specialize=["low_stride"])
def _shrink(
    inputs, matrices, out, order, counts, starts, adapters, inputs_stride, adapter_stride, low_stride,
    RANK: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tile, group = tl.program_id(0), tl.program_id(1)
    adapter = tl.load(adapters + group)
    if adapter >= 0 and tile * ROWS < tl.load(counts + group):
        token, real = _rows_of(order, counts, starts, group, tile, ROWS)
        column, inner = tl.arange(0, PADDED), tl.arange(0, TILE)
        of_token = inputs + token[:, None] * inputs_stride + inner[None, :]
        matrix = matrices + adapter.to(tl.int64) * adapter_stride
        of_column = matrix + tl.where(column < RANK, column, 0)[:, None] * DEPTH + inner[None, :]
        total = tl.zeros((ROWS, PADDED), tl.float32)
        for start in range(0, DEPTH, TILE):
            near = (inner < DEPTH - start)[None, :]
            left = tl.load(of_token + start, mask=near, other=0.0)
            right = tl.load(of_column + start, mask=near & (column < RANK)[:, None], other=0.0)
            total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
        place = out + token[:, None] * low_stride + column[None, :]
        tl.store(place, total.to(out.dtype.element_ty), mask=real[:, None] & (column < RANK)[None, :])


@triton.jit(do_not_specialize=["low_stride", "width", "period", "start"])
def _expand(
    low, matrices, out, given, order, counts, starts, adapters, low_stride, adapter_stride, feature_stride, out_stride,
    width, period, start, FEATURES: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    across: tl.constexpr = (FEATURES + COLUMNS - 1) // COLUMNS
    first, group = tl.program_id(0) // across * BLOCKS, tl.program_id(1)
    adapter, count = tl.load(adapters + group), tl.load(counts + group)
    if adapter >= 0 and first * ROWS < count:
        begin = tl.program_id(0) % across * COLUMNS
        feature, inner = begin + tl.arange(0, COLUMNS), tl.arange(0, PADDED)
        inside = feature < FEATURES
        matrix = matrices + adapter.to(tl.int64) * adapter_stride
        of_feature = matrix + feature.to(tl.int64)[:, None] * feature_stride + inner[None, :]
        right = tl.load(of_feature, mask=inside[:, None] & (inner < RANK)[None, :], other=0.0)
        # One run holds the whole tile: the compiler may load and store 16 bytes at a time.
        column = tl.multiple_of(begin // width * period + begin % width + start, 16) + tl.arange(0, COLUMNS)
        for tile in range(first, tl.minimum(first + BLOCKS, tl.cdiv(count, ROWS))):
            token, real = _rows_of(order, counts, starts, group, tile, ROWS)
            left = tl.load(low + token[:, None] * low_stride + inner[None, :], mask=(inner < RANK)[None, :], other=0.0)
            total = tl.dot(left, tl.trans(right), input_precision="ieee")
            place = token[:, None] * out_stride + column[None, :]
            stored = real[:, None] & inside[None, :]
            total += tl.load(given + place, mask=stored, other=0.0).to(tl.float32)
            tl.store(out + place, total.to(out.dtype.element_ty), mask=stored)
