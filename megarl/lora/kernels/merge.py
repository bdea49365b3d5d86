# SPDX-License-Identifier: Apache-2.0
"""Add an adapter to a weight in one pass: products and sum in float32, rounded once, out of place."""

import torch
import triton
import triton.language as tl

# Rows and columns of a program's part of the weight; least size of a dot's inner dimension.
ROWS, COLUMNS, INNER = 64, 128, 16


def merge(base: torch.Tensor, matrix_a: torch.Tensor, matrix_b: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return ``base + scaling * B @ A`` as a new contiguous tensor of base's dtype.

    Args:
        base: ``[out, in]`` on a GPU; any strides.
        matrix_a: ``[r, in]``; any strides and floating dtype.
        matrix_b: ``[out, r]``; likewise.
        scaling: what the product is multiplied by.
    """
    (rows, columns), rank = base.shape, matrix_a.shape[0]
    merged = torch.empty(base.shape, dtype=base.dtype, device=base.device)
    grid = triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS)
    inner = min(max(triton.next_power_of_2(rank), INNER), 64)
    _merge[grid](
        base, matrix_a, matrix_b, merged, scaling, rows, columns, rank,
        *base.stride(), *matrix_a.stride(), *matrix_b.stride(), ROWS=ROWS, COLUMNS=COLUMNS, INNER=inner,
    )  # fmt: skip
    return merged


@triton.jit
def _merge(
    base, matrix_a, matrix_b, merged, scaling, rows, columns, rank,
    base_row, base_column, a_row, a_column, b_row, b_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    there = (row < rows)[:, None] & (column < columns)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, rank, INNER):
        inner = first + tl.arange(0, INNER)
        b_place = matrix_b + row[:, None] * b_row + inner[None, :] * b_column
        a_place = matrix_a + inner[:, None] * a_row + column[None, :] * a_column
        b = tl.load(b_place, mask=(row < rows)[:, None] & (inner < rank)[None, :], other=0)
        a = tl.load(a_place, mask=(inner < rank)[:, None] & (column < columns)[None, :], other=0)
        total += tl.dot(b.to(tl.float32), a.to(tl.float32), input_precision="ieee")
    held = tl.load(base + row[:, None] * base_row + column[None, :] * base_column, mask=there, other=0)
    value = held.to(tl.float32) + total * scaling
    tl.store(merged + row[:, None] * columns + column[None, :], value.to(merged.dtype.element_ty), mask=there)
