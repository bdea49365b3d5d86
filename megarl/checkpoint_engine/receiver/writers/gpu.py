# SPDX-License-Identifier: Apache-2.0
"""Write matrices into padded buffers on a GPU: per bucket one kernel that writes, and one that reads back."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from megarl.checkpoint_engine.buckets.host_copies import to_host
from megarl.checkpoint_engine.kernels.replays import Replays
from megarl.checkpoint_engine.kernels.slot import BLOCK, FLAT_BLOCK, Jobs, is_flat, write
from megarl.checkpoint_engine.receiver.writers.jobs import Found, Source, Write
from megarl.triton_support import program_table

NOWHERE = Source(0, torch.bfloat16, 0, (0, 0), (0, 0))


class _Launch(NamedTuple):
    """One launch: writes from one dtype into one, of one kind (``Jobs``), in order, and the same on the GPU."""

    source: torch.dtype
    target: torch.dtype
    names: list[str]
    table: Jobs


class GpuWrites:
    """See ``jobs.Writes``. Works on the current stream."""

    def __init__(self, writes: Sequence[Write]) -> None:
        self._device = writes[0].target.device
        groups: dict[tuple[torch.dtype, torch.dtype, bool, bool], list[Write]] = {}
        for one in writes:
            flat = is_flat(_column(one), one.target.itemsize)
            groups.setdefault(((one.source or NOWHERE).dtype, one.target.dtype, flat, one.held), []).append(one)
        self._launches = [
            _Launch(source, target, [one.name for one in group], self._table(group, flat, held))
            for (source, target, flat, held), group in groups.items()
        ]
        self._replays = Replays()

    def run(self, payload: torch.Tensor) -> Callable[[], Found]:
        """See ``jobs.Writes``. All kernels are launched when this returns."""
        if not payload.is_cuda:  # it comes to another place each time
            arrived = payload.to(self._device)
            result = to_host(self._launch(arrived))
        else:
            result = self._replays.run((payload.data_ptr(), len(payload)), lambda: self._launch(payload))
        return lambda: self._found(result())

    def capture(self) -> None:
        """See ``jobs.Writes``."""
        self._replays.capture()

    def _launch(self, payload: torch.Tensor) -> torch.Tensor:
        """Launch the kernels; return their counts, ``[2, jobs]`` of each launch one after the other."""
        outcome = torch.zeros(
            2 * sum(len(launch.names) for launch in self._launches), dtype=torch.int64, device=self._device
        )
        for launch, counts in zip(self._launches, self._parts(outcome), strict=True):
            size = launch.source.itemsize
            write(payload[: len(payload) // size * size], launch.table, launch.source, launch.target, counts)
        return outcome

    def _parts(self, outcome: torch.Tensor) -> list[torch.Tensor]:
        """Return the counts of each launch, ``[2, jobs]``."""
        parts = outcome.split([2 * len(launch.names) for launch in self._launches])
        return [part.view(2, -1) for part in parts]

    def _found(self, outcome: torch.Tensor) -> Found:
        """Return the names of the matrices whose counts are not zero."""
        found = Found([], [])
        if not outcome.numpy().any():
            return found
        for launch, counted in zip(self._launches, self._parts(outcome), strict=True):
            unlike, wrong = counted
            found.not_finite.extend(launch.names[i] for i in wrong.nonzero()[:, 0].tolist())
            found.different.extend(launch.names[i] for i in unlike.nonzero()[:, 0].tolist())
        return found

    def _table(self, writes: list[Write], flat: bool, held: bool) -> Jobs:
        """Bring a group of writes to the GPU."""
        sizes = [one.target.numel() for one in writes]
        columns = np.asarray([_column(one) for one in writes], dtype=np.int64).T.copy()
        programs = np.stack(program_table(sizes, FLAT_BLOCK if flat else BLOCK))
        scaling = torch.tensor([one.scaling for one in writes], dtype=torch.float32)
        columns, programs = (torch.from_numpy(table).to(self._device) for table in (columns, programs))
        return Jobs(columns, scaling.to(self._device), programs, flat, held)


def _column(one: Write) -> tuple[int, ...]:
    """Return the entries of ``kernels.slot.Jobs.columns`` for a write."""
    source, target = one.source or NOWHERE, one.target
    # The kernel's address arithmetic relies on it.
    assert target.stride(1) == 1, one.name
    return source.offset, *source.strides, *source.shape, target.data_ptr(), target.stride(0), *target.shape
