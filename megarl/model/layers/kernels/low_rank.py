# SPDX-License-Identifier: Apache-2.0
"""Add a low-rank product to a tile that another kernel has in its registers.

Shape letters: T tokens, R rank, O features.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from megarl.model.layers.kernels.rows import as_rows
from megarl.triton_support import power_of_two

# Least size of a dimension of a dot product.
LEAST = 16


class Factors(NamedTuple):
    """The arguments of a product ``scale * low @ matrix``, in a kernel's order.

    Attributes:
        low: ``[T, R]``; its rows are contiguous.
        matrix: ``[R, O]`` or, transposed, ``[O, R]``.
        scale: factor of the product.
        stride: of the rows of ``low``.
    """

    low: torch.Tensor
    matrix: torch.Tensor
    scale: float
    stride: int


def factors_of(low: Any, matrix: Any, place: Any, instead: torch.Tensor, along: int = 1) -> tuple[Factors, int]:
    """Return the factors of one part of an update (``updates.flattened``), and its rank; rank 0 for no product.

    ``instead`` is a tensor that a kernel gets in their place then, and does not read. ``along`` is the dimension of
    ``matrix`` that has the rank's size.
    """
    if matrix is None:
        return Factors(instead, instead, 0.0, 0), 0
    (start, scale), rows = place, as_rows(low)
    first = rows[:, start:] if start else rows
    return Factors(first, matrix.contiguous(), scale, rows.stride(0)), matrix.shape[along]


def rank_block(rank: int) -> int:
    """Return the size of the tile that holds all columns of ``low``; 0 for no product."""
    return max(LEAST, power_of_two(rank)) if rank else 0


@triton.jit
def low_rank_tile(
    low, matrix, scale, stride, row, column, tokens, width, rank_stride, column_stride, RANK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the tile ``scale * low[row] @ matrix[:, column]`` in float32.

    Args:
        low, matrix, scale, stride: ``Factors``. Element (k, column) of the matrix is ``k * rank_stride + column *
            column_stride`` behind its first.
        row, column: int64 rows and columns of the tile; those beyond ``tokens`` and ``width`` give zeros.
    """
    left = low_rows(low, stride, row, tl.arange(0, BLOCK), tokens, RANK)
    return low_rank_product(left, matrix, scale, column, width, rank_stride, column_stride, RANK, BLOCK)


@triton.jit
def low_rank_product(
    left, matrix, scale, column, width, rank_stride, column_stride, rank, BLOCK: tl.constexpr
):  # fmt: skip
    """Return what ``low_rank_tile`` does, for ``left``, the rows of ``low``, ``[rows, BLOCK]``."""
    right = matrix_columns(matrix, column, width, rank_stride, column_stride, rank, BLOCK)
    return scale * tl.dot(left, right, input_precision="ieee")


@triton.jit
def matrix_columns(matrix, column, width, rank_stride, column_stride, rank, BLOCK: tl.constexpr):
    """Return columns of the matrix of ``low_rank_tile``, ``[BLOCK, columns]``, with zeros beyond both its sizes."""
    k = tl.arange(0, BLOCK)
    place = matrix + k[:, None] * rank_stride + column[None, :] * column_stride
    return tl.load(place, mask=(k < rank)[:, None] & (column < width)[None, :], other=0.0)


@triton.jit
def low_rows(low, stride, row, k, tokens, rank):
    """Return rows of ``low``, ``[rows, columns of k]``, with zeros beyond ``tokens`` and ``rank``."""
    inside = (row < tokens)[:, None] & (k < rank)[None, :]
    return tl.load(low + row[:, None] * stride + k[None, :], mask=inside, other=0.0)
