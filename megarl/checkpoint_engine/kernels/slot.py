# SPDX-License-Identifier: Apache-2.0
"""Write an adapter's matrices into padded buffers, and read them back, in one launch each.

A job fills one buffer ``[R, C]`` from a matrix ``[r, c]``, r <= R, c <= C: it multiplies by the job's scaling in
float32, rounds once to the buffer's dtype, and writes zeros around it.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from megarl.checkpoint_engine.kernels.mix import mixed

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
        int64 ``[3, jobs]``: digest of what was written, digest of what the buffers hold then, number of values that
        are not finite.
    """
    outcome = torch.zeros(3, len(jobs.source), dtype=torch.int64, device=payload.device)
    grid = (len(jobs.jobs),)
    fixed = {"TARGET": KINDS[target], "BITS": _bits(target), "BLOCK": BLOCK, "num_warps": WARPS}
    _write[grid](payload.view(source), *jobs, outcome[0], outcome[2], **fixed)
    _read[grid](*jobs[6:], outcome[1], **fixed)
    return outcome


def _bits(dtype: torch.dtype) -> tl.dtype:
    return tl.uint32 if dtype.itemsize == 4 else tl.uint16


@triton.jit
def _digest(position, value, inside, BITS: tl.constexpr):
    key = (position.to(tl.uint64) << 32) + value.to(BITS, bitcast=True).to(tl.uint64)
    return tl.sum(tl.where(inside, mixed(key), 0))


@triton.jit
def _write(
    payload, source, row, column, rows, columns, scaling, target, stride, height, width, jobs, blocks,
    written, wrong, TARGET: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    job = tl.load(jobs + program)
    position = tl.load(blocks + program) * BLOCK + tl.arange(0, BLOCK)
    columns_all = tl.load(width + job)
    i, j = position // columns_all, position % columns_all
    inside = i < tl.load(height + job)
    real = inside & (i < tl.load(rows + job)) & (j < tl.load(columns + job))
    place = tl.load(source + job) + i * tl.load(row + job) + j * tl.load(column + job)
    value = tl.load(payload + place, mask=real, other=0).to(tl.float32) * tl.load(scaling + job)
    rounded = value.to(TARGET)
    out = tl.load(target + job).to(tl.pointer_type(TARGET))
    tl.store(out + i * tl.load(stride + job) + j, rounded, mask=inside)
    tl.atomic_add(written + job, _digest(position, rounded, inside, BITS))
    # NaN and infinity are the values whose difference from themselves is not 0.
    again = rounded.to(tl.float32)
    bad = tl.sum((real & ((again - again) != 0)).to(tl.int64))
    if bad > 0:
        tl.atomic_add(wrong + job, bad)


@triton.jit
def _read(
    target, stride, height, width, jobs, blocks, held,
    TARGET: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    job = tl.load(jobs + program)
    position = tl.load(blocks + program) * BLOCK + tl.arange(0, BLOCK)
    columns_all = tl.load(width + job)
    i, j = position // columns_all, position % columns_all
    inside = i < tl.load(height + job)
    out = tl.load(target + job).to(tl.pointer_type(TARGET))
    value = tl.load(out + i * tl.load(stride + job) + j, mask=inside, other=0)
    tl.atomic_add(held + job, _digest(position, value, inside, BITS))
