# SPDX-License-Identifier: Apache-2.0
"""Write an adapter into one slot's buffers on a GPU: per bucket one kernel that writes, and one that reads back."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from megarl.checkpoint_engine.kernels.mix import program_table
from megarl.checkpoint_engine.kernels.slot import BLOCK, Jobs, write
from megarl.checkpoint_engine.receiver.adapter_plan import Job, SlotPlan, Source
from megarl.checkpoint_engine.receiver.write_jobs import jobs_of, refuse

NOWHERE = Source(0, torch.bfloat16, 0, (0, 0), (0, 0))


class _Launch(NamedTuple):
    """One launch: jobs whose matrices have one dtype, in order, and the same on the GPU."""

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
            unlike, wrong = result.cpu()
            not_finite += [launch.jobs[i].name for i in wrong.nonzero()[:, 0].tolist()]
            different += [launch.jobs[i].name for i in unlike.nonzero()[:, 0].tolist()]
        refuse(not_finite, different)

    def _prepare(self, jobs: list[Job]) -> list[_Launch]:
        """Group jobs by the dtype of their matrices."""
        groups: dict[torch.dtype, list[Job]] = {}
        for job in jobs:
            groups.setdefault((job.source or NOWHERE).dtype, []).append(job)
        return [_Launch(dtype, group, self._table(group)) for dtype, group in groups.items()]

    def _table(self, jobs: list[Job]) -> Jobs:
        """Return the columns of ``kernels.slot.Jobs``."""
        sources = [job.source or NOWHERE for job in jobs]
        buffers = [self._buffers[job.buffer] for job in jobs]
        for job, buffer in zip(jobs, buffers, strict=True):
            # The kernel's address arithmetic relies on it.
            assert buffer.stride(1) == 1 and buffer.dtype == self._dtype, job.name
        items, blocks = program_table([buffer.numel() for buffer in buffers], BLOCK)
        columns: dict[str, Any] = {
            "source": [source.offset for source in sources],
            "row": [source.strides[0] for source in sources],
            "column": [source.strides[1] for source in sources],
            "rows": [source.shape[0] for source in sources],
            "columns": [source.shape[1] for source in sources],
            "target": [buffer.data_ptr() for buffer in buffers],
            "stride": [buffer.stride(0) for buffer in buffers],
            "height": [buffer.shape[0] for buffer in buffers],
            "width": [buffer.shape[1] for buffer in buffers],
            "jobs": items,
            "blocks": blocks,
        }
        whole = {name: torch.as_tensor(values, dtype=torch.int64) for name, values in columns.items()}
        scaling = torch.tensor([job.scaling for job in jobs], dtype=torch.float32)
        return Jobs(**{name: tensor.to(self._device) for name, tensor in (whole | {"scaling": scaling}).items()})
