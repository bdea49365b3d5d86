# SPDX-License-Identifier: Apache-2.0
"""Write an adapter into one slot's buffers on a GPU: per bucket one kernel that writes, and one that reads back."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from megarl.checkpoint_engine.kernels.mix import program_table
from megarl.checkpoint_engine.kernels.slot import BLOCK, FLAT_BLOCK, Jobs, is_flat, write
from megarl.checkpoint_engine.receiver.adapter_plan import Job, SlotPlan, Source
from megarl.checkpoint_engine.receiver.write_jobs import jobs_of, refuse

NOWHERE = Source(0, torch.bfloat16, 0, (0, 0), (0, 0))


class _Launch(NamedTuple):
    """One launch: jobs whose matrices have one dtype, all flat or none, in order, and the same on the GPU."""

    source: torch.dtype
    jobs: list[Job]
    table: Jobs


class GpuWriter:
    """See ``write_jobs.Writer``. Works on the current stream, and waits for it."""

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        self._buffers, self._dtype, self._device = buffers, buffers[0].dtype, buffers[0].device
        self._plan: SlotPlan | None = None
        self._launches: dict[int, list[_Launch]] = {}

    def write(self, plan: SlotPlan, bucket: int, payload: torch.Tensor, verify: Callable[[], None]) -> None:
        """See ``write_jobs.Writer``. All kernels are launched before the first result is waited for."""
        if plan is not self._plan:
            self._plan, self._launches = plan, {}
        if bucket not in self._launches:
            self._launches[bucket] = self._prepare(jobs_of(plan, bucket))
        payload = payload.to(self._device)
        results = []
        for launch in self._launches[bucket]:
            size = launch.source.itemsize
            whole = payload[: payload.numel() // size * size]
            results.append(write(whole, launch.table, launch.source, self._dtype))
        verify()
        not_finite, different = [], []
        for launch, result in zip(self._launches[bucket], results, strict=True):
            counted = result.cpu()
            if not counted.any():
                continue
            unlike, wrong = counted
            not_finite += [launch.jobs[i].name for i in wrong.nonzero()[:, 0].tolist()]
            different += [launch.jobs[i].name for i in unlike.nonzero()[:, 0].tolist()]
        refuse(not_finite, different)

    def _prepare(self, jobs: list[Job]) -> list[_Launch]:
        """Group jobs by the dtype of their matrices, and by whether they are flat."""
        groups: dict[tuple[torch.dtype, bool], list[Job]] = {}
        for job in jobs:
            flat = is_flat(self._column(job), self._dtype.itemsize)
            groups.setdefault(((job.source or NOWHERE).dtype, flat), []).append(job)
        return [_Launch(dtype, group, self._table(group, flat)) for (dtype, flat), group in groups.items()]

    def _column(self, job: Job) -> tuple[int, ...]:
        """Return a job's entries of ``kernels.slot.Jobs.columns``."""
        source, buffer = job.source or NOWHERE, self._buffers[job.buffer]
        # The kernel's address arithmetic relies on it.
        assert buffer.stride(1) == 1 and buffer.dtype == self._dtype, job.name
        return source.offset, *source.strides, *source.shape, buffer.data_ptr(), buffer.stride(0), *buffer.shape

    def _table(self, jobs: list[Job], flat: bool) -> Jobs:
        """Bring a group of jobs to the GPU."""
        sizes = [self._buffers[job.buffer].numel() for job in jobs]
        columns = np.asarray([self._column(job) for job in jobs], dtype=np.int64).T.copy()
        programs = np.stack(program_table(sizes, FLAT_BLOCK if flat else BLOCK))
        scaling = torch.tensor([job.scaling for job in jobs], dtype=torch.float32)
        columns, programs = (torch.from_numpy(table).to(self._device) for table in (columns, programs))
        return Jobs(columns, scaling.to(self._device), programs, flat)
