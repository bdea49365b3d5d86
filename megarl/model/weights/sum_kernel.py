# SPDX-License-Identifier: Apache-2.0
"""Copy many weights into a buffer on a GPU, with or without an adapter's update: one launch per combination of dtypes.

Products and sums are float32, rounded once. The weights themselves are only read.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from megarl.model.weights.sharded_tensor import Update
from megarl.triton_support import ceil_div, power_of_two, program_table

# Rows and columns of a program's part of a weight; bytes at a time where everything is a multiple of them.
ROWS, COLUMNS, VECTOR = 64, 128, 16
# Least and greatest size of a dot's inner dimension.
INNER = 16, 64


class Job(NamedTuple):
    """One weight, or some of its rows.

    Attributes:
        base: ``[segments, rows, columns]``, strided; the weight has the rows of all segments, one after the other.
        update: what is added.
        first, rows: the rows to write.
        offset: byte offset in the buffer, where they lie contiguous.
    """

    base: torch.Tensor
    update: Update | None
    first: int
    rows: int
    offset: int


# Of a base, its A and its B.
_Dtypes = tuple[torch.dtype, torch.dtype, torch.dtype]


class _Launch(NamedTuple):
    """Jobs of the same dtypes, on the GPU.

    Attributes:
        dtypes: of bases, A and B.
        fast: True if rows are contiguous and lie at multiples of ``VECTOR`` bytes, on both sides.
        inner: size of a dot's inner dimension.
        columns: int64 ``[fields, jobs]``, see ``_column``.
        scalings: float32 ``[jobs]``.
        programs: int64 ``[2, programs]``: each program's job, and the index of its part of it.
    """

    dtypes: _Dtypes
    fast: bool
    inner: int
    columns: torch.Tensor
    scalings: torch.Tensor
    programs: torch.Tensor


class Sums:
    """Writes jobs into a buffer, again and again, as long as bases and factors stay where they are."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        groups: dict[tuple[_Dtypes, bool], list[Job]] = {}
        for job in jobs:
            if job.rows and job.base.shape[2]:
                groups.setdefault((_dtypes(job), _is_fast(job)), []).append(job)
        self._launches = [_launch(dtypes, fast, group) for (dtypes, fast), group in groups.items()]

    def __call__(self, payload: torch.Tensor) -> None:
        """Write into ``[nbytes]`` uint8, on the current stream. The host does not wait."""
        for launch in self._launches:
            base, matrix_a, matrix_b = map(_triton, launch.dtypes)
            _write[(launch.programs.shape[1],)](
                payload, launch.columns, launch.scalings, launch.programs, launch.columns.shape[1],
                launch.programs.shape[1], BASE=base, A=matrix_a, B=matrix_b, FAST=launch.fast, ROWS=ROWS,
                COLUMNS=COLUMNS, INNER=launch.inner, NATIVE=matrix_a == matrix_b and launch.dtypes[1].itemsize == 2,
            )  # fmt: skip


def add(base: torch.Tensor, update: Update) -> torch.Tensor:
    """Return ``base + scaling * B @ A`` as a new contiguous tensor of base's dtype.

    Args:
        base: ``[out, in]`` on a GPU; any strides.
        update: A, B and scaling.
    """
    whole = torch.empty(base.shape, dtype=base.dtype, device=base.device)
    Sums([Job(base[None], update, 0, base.shape[0], 0)])(whole.view(-1).view(torch.uint8))
    return whole


def _dtypes(job: Job) -> _Dtypes:
    base = job.base.dtype
    return (base, base, base) if job.update is None else (base, job.update.matrix_a.dtype, job.update.matrix_b.dtype)


def _is_fast(job: Job) -> bool:
    matrices = [job.base, *(job.update[:2] if job.update else ())]
    return job.offset % VECTOR == 0 and all(map(_has_vectors, matrices))


def _has_vectors(matrix: torch.Tensor) -> bool:
    """Return True if rows are contiguous, and begin and end at multiples of ``VECTOR`` bytes."""
    *outer, last = matrix.stride()
    sizes = [matrix.shape[-1], *outer]
    return last == 1 and matrix.data_ptr() % VECTOR == 0 and all(n * matrix.itemsize % VECTOR == 0 for n in sizes)


def _launch(dtypes: _Dtypes, fast: bool, jobs: list[Job]) -> _Launch:
    """Bring jobs to the GPU."""
    device = jobs[0].base.device
    columns = np.asarray([_column(job) for job in jobs], dtype=np.int64).T.copy()
    scalings = np.asarray([job.update.scaling if job.update else 0.0 for job in jobs], dtype=np.float32)
    tiles = [ceil_div(job.rows, ROWS) * ceil_div(job.base.shape[2], COLUMNS) for job in jobs]
    programs = np.stack(program_table(tiles, 1))
    rank = max(job.update.matrix_a.shape[0] if job.update else 0 for job in jobs)
    inner = min(max(power_of_two(max(rank, 1)), INNER[0]), INNER[1])
    tables = (torch.from_numpy(table).to(device) for table in (columns, scalings, programs))
    return _Launch(dtypes, fast, inner, *tables)


def _column(job: Job) -> tuple[int, ...]:
    """Return what the kernel reads of a job, in its order."""
    base = job.base
    place = base.data_ptr(), base.shape[1], *base.stride(), job.first, job.rows, base.shape[2], job.offset
    if job.update is None:
        return *place, 0, 0, 0, 0, 0, 0, 0
    matrix_a, matrix_b, _ = job.update
    factors = matrix_a.data_ptr(), *matrix_a.stride(), matrix_b.data_ptr(), *matrix_b.stride()
    return *place, matrix_a.shape[0], *factors


def _triton(dtype: torch.dtype) -> tl.dtype:
    return getattr(tl, {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16"}[str(dtype)[6:]])


@triton.jit
def _pointer(address, DTYPE: tl.constexpr, FAST: tl.constexpr):
    found = address.to(tl.pointer_type(DTYPE))
    return tl.multiple_of(found, 16) if FAST else found


@triton.jit
def _write(
    payload, columns, scalings, programs, jobs, launched,
    BASE: tl.constexpr, A: tl.constexpr, B: tl.constexpr, FAST: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, INNER: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    number = tl.load(programs + tl.program_id(0))
    block = tl.load(programs + launched + tl.program_id(0))
    field = columns + number
    base, segment = tl.load(field), tl.load(field + jobs)
    segment_stride, row_stride = tl.load(field + 2 * jobs), tl.load(field + 3 * jobs)
    column_stride, first = tl.load(field + 4 * jobs), tl.load(field + 5 * jobs)
    rows, width, offset = tl.load(field + 6 * jobs), tl.load(field + 7 * jobs), tl.load(field + 8 * jobs)
    if FAST:
        # What the kernel reads from a table, the compiler cannot know to be a multiple of anything.
        offset, width = tl.multiple_of(offset, 16), tl.multiple_of(width, 128 // BASE.primitive_bitwidth)
        segment_stride = tl.multiple_of(segment_stride, 128 // BASE.primitive_bitwidth)
        row_stride = tl.multiple_of(row_stride, 128 // BASE.primitive_bitwidth)
    across = tl.cdiv(width, COLUMNS)
    local = (block // across) * ROWS + tl.arange(0, ROWS)
    column = (block % across) * COLUMNS + tl.arange(0, COLUMNS)
    there = (local < rows)[:, None] & (column < width)[None, :]
    row = first + local
    source = (row // segment) * segment_stride + (row % segment) * row_stride
    step = column if FAST else column * column_stride
    held = tl.load(_pointer(base, BASE, FAST) + source[:, None] + step[None, :], mask=there, other=0)
    rank = tl.load(field + 9 * jobs)
    if rank > 0:
        a, a_row, a_column = tl.load(field + 10 * jobs), tl.load(field + 11 * jobs), tl.load(field + 12 * jobs)
        b, b_row, b_column = tl.load(field + 13 * jobs), tl.load(field + 14 * jobs), tl.load(field + 15 * jobs)
        if FAST:
            a_row, a_column = tl.multiple_of(a_row, 128 // A.primitive_bitwidth), 1
            b_row, b_column = tl.multiple_of(b_row, 128 // B.primitive_bitwidth), 1
            rank = tl.multiple_of(rank, 128 // B.primitive_bitwidth)
        matrix_a, matrix_b = _pointer(a, A, FAST), _pointer(b, B, FAST)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for begin in range(0, rank, INNER):
            inner = begin + tl.arange(0, INNER)
            b_place = matrix_b + row[:, None] * b_row + inner[None, :] * b_column
            a_place = matrix_a + inner[:, None] * a_row + column[None, :] * a_column
            left = tl.load(b_place, mask=(local < rows)[:, None] & (inner < rank)[None, :], other=0)
            right = tl.load(a_place, mask=(inner < rank)[:, None] & (column < width)[None, :], other=0)
            if NATIVE:
                # Products of 16-bit numbers are exact in float32.
                total += tl.dot(left, right, out_dtype=tl.float32)
            else:
                total += tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
        held = (held.to(tl.float32) + total * tl.load(scalings + number)).to(BASE)
    target = (payload + offset).to(tl.pointer_type(BASE))
    tl.store(target + local[:, None] * width + column[None, :], held, mask=there)
