# SPDX-License-Identifier: Apache-2.0
"""Write an adapter's matrices into padded buffers, and read them back, in one launch each.

A job fills one buffer ``[R, C]`` from a matrix ``[r, c]``, r <= R, c <= C: it multiplies by the job's scaling in
float32, rounds once to the buffer's dtype, and writes zeros around it. What is read back is compared, bit by bit, with
the same computed once more.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

BLOCK, WARPS = 2048, 4
KINDS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class Jobs(NamedTuple):
    """Jobs of one bucket with one source dtype, on the GPU: one entry per job, then one per program.

    Attributes:
        source, row, column: element offset of the matrix in the bucket; its strides in elements. int64.
        rows, columns: r and c; int64. 0 for a buffer that gets zeros only.
        scaling: float32.
        target, stride, height, width: address of the buffer, its row stride, R and C; int64.
        jobs, blocks: each program's job, and its block of ``BLOCK`` elements in the buffer; int64.
    """

    source: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    scaling: torch.Tensor
    target: torch.Tensor
    stride: torch.Tensor
    height: torch.Tensor
    width: torch.Tensor
    jobs: torch.Tensor
    blocks: torch.Tensor


def write(payload: torch.Tensor, jobs: Jobs, source: torch.dtype, target: torch.dtype) -> torch.Tensor:
    """Run jobs on the current stream.

    Args:
        payload: the bucket, ``[nbytes]`` uint8.
        jobs: what to do.
        source, target: dtypes of the matrices and of the buffers.

    Returns:
        int64 ``[2, jobs]``: number of values that the buffers do not hold, number of values that are not finite.
    """
    outcome = torch.zeros(2, len(jobs.source), dtype=torch.int64, device=payload.device)
    grid = (len(jobs.jobs),)
    fixed = {"TARGET": KINDS[target], "BITS": _bits(target), "BLOCK": BLOCK, "num_warps": WARPS}
    _run[grid](payload.view(source), *jobs, outcome[1], READ=False, **fixed)
    _run[grid](payload.view(source), *jobs, outcome[0], READ=True, **fixed)
    return outcome


def _bits(dtype: torch.dtype) -> tl.dtype:
    return tl.uint32 if dtype.itemsize == 4 else tl.uint16


@triton.jit
def _run(
    payload, source, row, column, rows, columns, scaling, target, stride, height, width, jobs, blocks, wrong,
    READ: tl.constexpr, TARGET: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a block of a buffer and count what is not finite; or read it and count what differs."""
    program = tl.program_id(0)
    job = tl.load(jobs + program)
    first, size = tl.load(blocks + program) * BLOCK, tl.load(width + job)
    top = first // size
    # The row of each value among the block's. Division by a float is exact here: the numbers are below 2^22, and half
    # a column is added, which is more than the rounding.
    inner = (first - top * size).to(tl.int32) + tl.arange(0, BLOCK)
    below = ((inner.to(tl.float32) + 0.5) / size.to(tl.float32)).to(tl.int32)
    i, j = top + below, inner - below * size.to(tl.int32)
    inside = i < tl.load(height + job)
    real = inside & (i < tl.load(rows + job)) & (j < tl.load(columns + job))
    place = tl.load(source + job) + i * tl.load(row + job) + j * tl.load(column + job)
    value = tl.load(payload + place, mask=real, other=0).to(tl.float32) * tl.load(scaling + job)
    rounded = value.to(TARGET)
    out = tl.load(target + job).to(tl.pointer_type(TARGET)) + i * tl.load(stride + job) + j
    if READ:
        held = tl.load(out, mask=inside, other=0).to(BITS, bitcast=True)
        bad = inside & (held != rounded.to(BITS, bitcast=True))
    else:
        tl.store(out, rounded, mask=inside)
        # NaN and infinity are the values whose difference from themselves is not 0.
        again = rounded.to(tl.float32)
        bad = real & ((again - again) != 0)
    count = tl.sum(bad.to(tl.int64))
    if count > 0:
        tl.atomic_add(wrong + job, count)
