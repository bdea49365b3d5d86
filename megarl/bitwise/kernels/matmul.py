# SPDX-License-Identifier: Apache-2.0
"""Multiply rows by a weight: one program per tile of the result, which walks all of K in order.

Shape letters: T tokens, K input features, N output features.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from megarl.bitwise.kernels.launch import UNFUSED, aligned
from megarl.triton_support import ceil_div


@dataclass(frozen=True)
class Tiles:
    """Tile sizes and launch options of one configuration.

    Attributes:
        rows, columns, depth: tile of the result, and elements of K that are loaded at a time.
        group: row tiles that neighbouring programs share a column tile with, so that they find it in the L2 cache.
        warps, stages: of Triton.
    """

    rows: int
    columns: int
    depth: int
    group: int
    warps: int
    stages: int


# Both multiply by Hopper's warp-group instruction, 16 elements of K at a time, into float32 sums: an element's sum has
# the same terms in the same order in both. tests/gpu/bitwise_ops.py compares their bits.
WIDE = Tiles(128, 128, 64, 8, 8, 4)
NARROW = Tiles(64, 64, 128, 8, 4, 4)
NARROW_TOKENS = 256


def tiles_of(tokens: int) -> Tiles:
    """Return the tiles for a number of tokens. The choice changes the time, not the result."""
    return NARROW if tokens <= NARROW_TOKENS else WIDE


def matmul(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """Return ``inputs @ weight.T + bias``, summed in float32 and rounded once.

    Args:
        inputs: ``[T, K]``.
        weight: ``[N, K]``, of the same dtype.
        bias: ``[N]`` or None.
        dtype: of the result; default: of the inputs.
        tiles: default: by T.

    Returns:
        ``[T, N]``.

    Raises:
        ValueError: K is not a multiple of 16.
    """
    inputs, weight = aligned(inputs), aligned(weight)
    (tokens, depth), columns = inputs.shape, len(weight)
    out = torch.empty(tokens, columns, dtype=dtype or inputs.dtype, device=inputs.device)
    tiles = tiles or tiles_of(tokens)
    grid = (ceil_div(tokens, tiles.rows) * ceil_div(columns, tiles.columns),)
    if tokens:
        _matmul[grid](
            inputs,
            weight,
            weight if bias is None else bias,
            out,
            tokens,
            columns,
            inputs.stride(0),
            weight.stride(0),
            DEPTH=depth,
            BIAS=bias is not None,
            ROWS=tiles.rows,
            COLUMNS=tiles.columns,
            TILE=tiles.depth,
            GROUP=tiles.group,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            **UNFUSED,
        )
    return out


@triton.jit(do_not_specialize=["tokens"])
def _matmul(
    inputs, weight, bias, out, tokens, columns, inputs_stride, weight_stride, DEPTH: tl.constexpr,
    BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row_tiles, column_tiles = tl.cdiv(tokens, ROWS), tl.cdiv(columns, COLUMNS)
    first = program // (GROUP * column_tiles) * GROUP
    grouped = tl.minimum(row_tiles - first, GROUP)
    within = program % (GROUP * column_tiles)
    row = (first + within % grouped) * ROWS + tl.arange(0, ROWS)
    column = within // grouped * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, TILE)
    # Rows beyond the last repeat the first; they are not stored.
    of_row = inputs + tl.where(row < tokens, row, 0).to(tl.int64)[:, None] * inputs_stride + inner[None, :]
    of_column = weight + tl.where(column < columns, column, 0).to(tl.int64)[:, None] * weight_stride + inner[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, DEPTH, TILE):
        if DEPTH % TILE == 0:
            left, right = tl.load(of_row + start), tl.load(of_column + start)
        else:
            left = tl.load(of_row + start, mask=(inner < DEPTH - start)[None, :], other=0.0)
            right = tl.load(of_column + start, mask=(inner < DEPTH - start)[None, :], other=0.0)
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    inside = (row < tokens)[:, None] & (column < columns)[None, :]
    place = out + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=inside)
