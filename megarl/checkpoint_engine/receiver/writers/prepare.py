# SPDX-License-Identifier: Apache-2.0
"""Prepare writes for the device that their buffers are on."""

from collections.abc import Sequence

from megarl.checkpoint_engine.receiver.writers.jobs import Write, Writes


def prepare(writes: Sequence[Write]) -> Writes:
    """Return how the writes of one bucket are made where their buffers are."""
    if writes and writes[0].target.is_cuda:
        from megarl.checkpoint_engine.receiver.writers.gpu import GpuWrites

        return GpuWrites(writes)
    from megarl.checkpoint_engine.receiver.writers.host import HostWrites

    return HostWrites(writes)
