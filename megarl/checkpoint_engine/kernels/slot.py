# SPDX-License-Identifier: Apache-2.0
"""Write an adapter's matrices into padded buffers, and read them back, in one launch each.

A job fills one buffer ``[R, C]`` from a matrix ``[r, c]``, r <= R, c <= C: it multiplies by the job's scaling in
float32, rounds once to the buffer's dtype, and writes zeros around it. What is read back is compared, bit by bit, with
the same computed once more. A job whose buffer is held compares only.

A job is flat if the matrix lies in the first elements of its buffer in the same order, as it does unless it is cut
for tensor parallelism or has a smaller rank than the buffer. Then whole vectors move.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

# Elements of a program, of either kind; elements of a vector.
BLOCK, FLAT_BLOCK, WARPS, VECTOR = 2048, 4096, 4, 8
KINDS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class Jobs(NamedTuple):
    """Jobs of one bucket with one source dtype, all flat or none, all held or none, on the GPU.

    Attributes:
        columns: int64 ``[9, jobs]``: element offset of the matrix in the bucket, its two strides in elements, r, c
            (0 for a buffer that gets zeros only); address of the buffer, its row stride, R, C.
        scaling: float32 ``[jobs]``.
        programs: int64 ``[2, programs]``: each program's job, and its block of the buffer.
        flat: True if all jobs are flat.
        held: True if no job writes: the buffers must hold the matrices already.
    """

    columns: torch.Tensor
    scaling: torch.Tensor
    programs: torch.Tensor
    flat: bool
    held: bool


def is_flat(column: tuple[int, ...], itemsize: int) -> bool:
    """Return True if a job, given as its entries of ``Jobs.columns``, can be run as a flat one.

    Args:
        column: the entries.
        itemsize: bytes of an element of the buffer.
    """
    source, row, step, rows, columns, target, stride, _, width = column
    same = not rows or (step == 1 and row == columns == width)
    return same and stride == width and not (source | rows * columns | target // itemsize) % VECTOR


def write(payload: torch.Tensor, jobs: Jobs, source: torch.dtype, target: torch.dtype, outcome: torch.Tensor) -> None:
    """Run jobs on the current stream.

    Args:
        payload: the bucket, ``[nbytes]`` uint8.
        jobs: what to do.
        source, target: dtypes of the matrices and of the buffers.
        outcome: int64 ``[2, jobs]``, to which is added: number of values that the buffers do not hold, number of values
            that are not finite.
    """
    count, programs = len(jobs.scaling), jobs.programs.shape[1]
    given = payload.view(source), *jobs[:3], outcome, count, programs
    fixed = {
        "FLAT": jobs.flat, "HELD": jobs.held, "TARGET": KINDS[target], "BITS": _bits(target), "num_warps": WARPS
    }  # fmt: skip
    for read in (False, True):
        _run[(programs,)](*given, READ=read, BLOCK=FLAT_BLOCK if jobs.flat else BLOCK, VECTOR=VECTOR, **fixed)


def _bits(dtype: torch.dtype) -> tl.dtype:
    return tl.uint32 if dtype.itemsize == 4 else tl.uint16


@triton.jit
def _run(
    payload, columns, scaling, programs, outcome, count, launched,
    READ: tl.constexpr, FLAT: tl.constexpr, HELD: tl.constexpr, TARGET: tl.constexpr, BITS: tl.constexpr,
    BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Write a block of a buffer, unless held, and count what is not finite; or read it and count what differs."""
    program = tl.program_id(0)
    job = tl.load(programs + program)
    first = tl.load(programs + launched + program) * BLOCK
    entry = columns + job
    source, rows, width = tl.load(entry), tl.load(entry + 3 * count), tl.load(entry + 4 * count)
    address, height, size = tl.load(entry + 5 * count), tl.load(entry + 7 * count), tl.load(entry + 8 * count)
    target = address.to(tl.pointer_type(TARGET))
    if FLAT:
        place = first + tl.arange(0, BLOCK)
        inside = place < tl.multiple_of(height * size, VECTOR)
        real = place < tl.multiple_of(rows * width, VECTOR)
        out = tl.multiple_of(target, 16) + place
        place += tl.multiple_of(source, VECTOR)
    else:
        top = first // size
        # The row of each value among the block's. Division by a float is exact here: the numbers are below 2^22, and
        # half a column is added, which is more than the rounding.
        inner = (first - top * size).to(tl.int32) + tl.arange(0, BLOCK)
        below = ((inner.to(tl.float32) + 0.5) / size.to(tl.float32)).to(tl.int32)
        i, j = top + below, inner - below * size.to(tl.int32)
        inside = i < height
        real = inside & (i < rows) & (j < width)
        place = source + i * tl.load(entry + count) + j * tl.load(entry + 2 * count)
        out = target + i * tl.load(entry + 6 * count) + j
    value = tl.load(payload + place, mask=real, other=0).to(tl.float32) * tl.load(scaling + job)
    rounded = value.to(TARGET)
    if READ:
        held = tl.load(out, mask=inside, other=0).to(BITS, bitcast=True)
        bad = inside & (held != rounded.to(BITS, bitcast=True))
        wrong = outcome + job
    else:
        if not HELD:
            tl.store(out, rounded, mask=inside)
        # Not by their difference from themselves: a compiler may fuse that with the product, whose rounding then shows.
        again = rounded.to(tl.float32)
        bad = real & ((again != again) | (tl.abs(again) == float("inf")))
        wrong = outcome + count + job
    found = tl.sum(bad.to(tl.int32))
    if found > 0:
        tl.atomic_add(wrong, found.to(tl.int64))
