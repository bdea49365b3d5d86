# SPDX-License-Identifier: Apache-2.0
"""Write matrices into padded buffers and read them back: with torch on a CPU, with two kernels per bucket on a GPU."""

from collections.abc import Callable

import torch

from megarl.checkpoint_engine.receiver.adapter_plan import Job, SlotPlan, Source
from megarl.checkpoint_engine.receiver.write_jobs import Writer, jobs_of, refuse
from megarl.checkpoint_engine.stream import is_finite


def writer_for(buffers: list[torch.Tensor]) -> Writer:
    """Return the writer for one slot's buffers, each ``[R, C]``, in the order of the jobs."""
    if buffers and buffers[0].is_cuda:
        from megarl.checkpoint_engine.receiver.gpu_writer import GpuWriter

        return GpuWriter(buffers)
    return HostWriter(buffers)


class HostWriter:
    """See ``Writer``."""

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        self._buffers = buffers
        self._jobs: dict[int, tuple[SlotPlan, list[Job]]] = {}

    def write(self, plan: SlotPlan, bucket: int, payload: torch.Tensor, verify: Callable[[], None]) -> None:
        """See ``Writer``."""
        verify()
        if bucket not in self._jobs or self._jobs[bucket][0] is not plan:
            self._jobs[bucket] = plan, jobs_of(plan, bucket)
        not_finite, different = [], []
        for job in self._jobs[bucket][1]:
            buffer = self._buffers[job.buffer]
            if job.source is None:
                buffer.zero_()
                if buffer.any():
                    different.append(job.name)
                continue
            matrix = matrix_of(payload, job.source)
            block = matrix.to(buffer.dtype) if job.scaling == 1 else (matrix.float() * job.scaling).to(buffer.dtype)
            rows, columns = block.shape
            buffer[:rows, :columns] = block
            buffer[rows:] = 0
            buffer[:rows, columns:] = 0
            if not is_finite(block):
                not_finite.append(job.name)
            elif not _holds(buffer, block):
                different.append(job.name)
        refuse(not_finite, different)


def matrix_of(payload: torch.Tensor, source: Source) -> torch.Tensor:
    """Return a view of a matrix in a bucket."""
    size = source.dtype.itemsize
    flat = payload[: payload.numel() // size * size].view(source.dtype)
    return flat.as_strided(source.shape, source.strides, flat.storage_offset() + source.offset)


def _holds(buffer: torch.Tensor, block: torch.Tensor) -> bool:
    """Return True if a padded buffer holds exactly ``block``, and zeros around it."""
    rows, columns = block.shape
    inside = torch.equal(buffer[:rows, :columns], block)
    return inside and not buffer[rows:].any() and not buffer[:rows, columns:].any()
