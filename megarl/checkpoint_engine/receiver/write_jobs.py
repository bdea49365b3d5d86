# SPDX-License-Identifier: Apache-2.0
"""Define a writer of adapters into vLLM's buffers, and what all writers share: a bucket's jobs, and the refusal."""

from collections.abc import Callable
from typing import Protocol

import torch

from megarl.checkpoint_engine.receiver.adapter_plan import Job, SlotPlan
from megarl.checkpoint_engine.wire import listed
from megarl.errors import WeightSyncError


class Writer(Protocol):
    """Fills the buffers of one slot."""

    def write(self, plan: SlotPlan, bucket: int, payload: torch.Tensor, verify: Callable[[], None]) -> None:
        """Do the jobs of one bucket, and those without a source with the first bucket. Returns when all is read back.

        Args:
            plan: the jobs.
            bucket: index of the bucket.
            payload: its bytes, ``[nbytes]`` uint8.
            verify: raises if they arrived damaged. Called before any other error is raised; a writer may have written
                them by then, into a slot that nobody uses.

        Raises:
            WeightSyncError: a value is not finite, or a buffer does not hold what was written; names the matrices.
        """
        ...


def jobs_of(plan: SlotPlan, bucket: int) -> list[Job]:
    """Return the jobs that a bucket allows."""
    first = bucket == 0
    return [job for job in plan.jobs if (first if job.source is None else job.source.bucket == bucket)]


def refuse(not_finite: list[str], different: list[str]) -> None:
    """Raise ``WeightSyncError`` if there are names of matrices in either list."""
    if not_finite:
        raise WeightSyncError(f"the adapter holds a value that is not finite in {listed(not_finite)}")
    if different:
        raise WeightSyncError(f"vLLM's buffers do not hold the adapter exactly in {listed(different)}")
