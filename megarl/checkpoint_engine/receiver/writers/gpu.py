# SPDX-License-Identifier: Apache-2.0
"""Write matrices into padded buffers on a GPU: per bucket one kernel that writes, and one that reads back."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from megarl.checkpoint_engine.buckets.host_copies import to_host
from megarl.checkpoint_engine.kernels.slot import BLOCK, FLAT_BLOCK, Jobs, is_flat, write
from megarl.checkpoint_engine.receiver.writers.jobs import Found, Source, Write
from megarl.triton_support import program_table

NOWHERE = Source(0, torch.bfloat16, 0, (0, 0), (0, 0))


class _Launch(NamedTuple):
    """One launch: writes from one dtype into one, all flat or none, in order, and the same on the GPU."""

    source: torch.dtype
    target: torch.dtype
    names: list[str]
    table: Jobs


class GpuWrites:
    """See ``jobs.Writes``. Works on the current stream."""

    def __init__(self, writes: Sequence[Write]) -> None:
        self._device = writes[0].target.device
        groups: dict[tuple[torch.dtype, torch.dtype, bool], list[Write]] = {}
        for one in writes:
            flat = is_flat(_column(one), one.target.itemsize)
            groups.setdefault(((one.source or NOWHERE).dtype, one.target.dtype, flat), []).append(one)
        self._launches = [
            _Launch(source, target, [one.name for one in group], self._table(group, flat))
            for (source, target, flat), group in groups.items()
        ]

    def run(self, payload: torch.Tensor) -> Callable[[], Found]:
        """See ``jobs.Writes``. All kernels are launched when this returns."""
        payload = payload.to(self._device)
        results = []
        for launch in self._launches:
            size = launch.source.itemsize
            whole = payload[: payload.numel() // size * size]
            results.append(to_host(write(whole, launch.table, launch.source, launch.target)))
        return lambda: self._found(results)

    def _found(self, results: list[Callable[[], torch.Tensor]]) -> Found:
        """Wait for the kernels' counts, and return the names of those that are not zero."""
        found = Found([], [])
        for launch, result in zip(self._launches, results, strict=True):
            counted = result()
            if not counted.any():
                continue
            unlike, wrong = counted
            found.not_finite.extend(launch.names[i] for i in wrong.nonzero()[:, 0].tolist())
            found.different.extend(launch.names[i] for i in unlike.nonzero()[:, 0].tolist())
        return found

    def _table(self, writes: list[Write], flat: bool) -> Jobs:
        """Bring a group of writes to the GPU."""
        sizes = [one.target.numel() for one in writes]
        columns = np.asarray([_column(one) for one in writes], dtype=np.int64).T.copy()
        programs = np.stack(program_table(sizes, FLAT_BLOCK if flat else BLOCK))
        scaling = torch.tensor([one.scaling for one in writes], dtype=torch.float32)
        columns, programs = (torch.from_numpy(table).to(self._device) for table in (columns, programs))
        return Jobs(columns, scaling.to(self._device), programs, flat)


def _column(one: Write) -> tuple[int, ...]:
    """Return the entries of ``kernels.slot.Jobs.columns`` for a write."""
    source, target = one.source or NOWHERE, one.target
    # The kernel's address arithmetic relies on it.
    assert target.stride(1) == 1, one.name
    return source.offset, *source.strides, *source.shape, target.data_ptr(), target.stride(0), *target.shape
