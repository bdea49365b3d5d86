# SPDX-License-Identifier: Apache-2.0
"""Write the tensors of a bucket into parameters, digest the bucket, and read back what was written.

On a GPU one kernel reads the bucket once for both, wherever a run of a tensor's bytes becomes a run of a parameter's;
another digests the parameters (``gpu_copies``). Whatever is cut, padded or scaled is written by ``writers``.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from megarl.checkpoint_engine.buckets.digests import begin_digests
from megarl.checkpoint_engine.buckets.stream import Inbox
from megarl.checkpoint_engine.receiver.writers.jobs import Begun, Found, Write, Writes
from megarl.checkpoint_engine.receiver.writers.prepare import prepare
from megarl.checkpoint_engine.records import Manifest, Receipt
from megarl.checkpoint_engine.wire import Places

if TYPE_CHECKING:
    from megarl.checkpoint_engine.receiver.weights.gpu_copies import Copies


class BucketWrites:
    """The writes of one bucket, prepared to be made again and again.

    Args:
        places: the bucket's tensors.
        writes: of each tensor what is written of it.
    """

    def __init__(self, places: Places, writes: Sequence[Sequence[Write]]) -> None:
        self._places, self._copies = places, _copies(places, writes)
        others = [write for group in writes for write in group] if self._copies is None else self._copies.others
        self._others: Writes | None = prepare(others) if others else None

    def run(self, payload: torch.Tensor) -> Begun:
        """Begin to write, to digest and to read back a bucket, ``[nbytes]`` uint8."""
        waits = [self._others.run(payload)] if self._others else []
        if self._copies is None:
            digests = begin_digests(payload, self._places)
        else:
            digests, found = self._copies.run(payload)
            waits.append(found)
        return Begun(digests, lambda: _together([wait() for wait in waits]))


def write_transfer(inbox: Inbox, writes_of: Callable[[Places], BucketWrites]) -> tuple[Manifest, Receipt]:
    """Write all buckets of a transfer.

    Args:
        inbox: the transfer.
        writes_of: returns the writes of a bucket, from its tensors.

    Raises:
        WeightSyncError: as ``Inbox.finish``; or a value is not finite, or a parameter does not hold what was written.
    """
    found: list[Found] = []

    def begin(payload: torch.Tensor, places: Places) -> Callable[[], bytes]:
        begun = writes_of(places).run(payload)

        def digests() -> bytes:
            found.append(begun.found())
            return begun.digests()

        return digests

    for _, _, verify in inbox.buckets(begin):
        verify()
    manifest, receipt = inbox.finish()
    for one in found:
        one.refuse(f"set of {manifest.kind} weights")
    return manifest, receipt


def _copies(places: Places, writes: Sequence[Sequence[Write]]) -> "Copies | None":
    """Return the copies of a bucket whose parameters are on a GPU; None on a CPU."""
    if not any(group and group[0].target.is_cuda for group in writes):
        return None
    from megarl.checkpoint_engine.receiver.weights.gpu_copies import Copies

    return Copies(places, writes)


def _together(found: list[Found]) -> Found:
    return Found(*([name for one in found for name in one[field]] for field in range(len(Found._fields))))
