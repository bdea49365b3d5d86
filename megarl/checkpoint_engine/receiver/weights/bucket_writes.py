# SPDX-License-Identifier: Apache-2.0
"""Write the tensors of a bucket into parameters, digest the bucket, and read back what was written.

On a GPU one kernel reads the bucket once for both, wherever a run of a tensor's bytes becomes a run of a parameter's;
another digests the parameters (``gpu_copies``). Whatever is cut, padded or scaled is written by ``writers``.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from megarl.checkpoint_engine.digests import begin_digests
from megarl.checkpoint_engine.receiver.writers.jobs import Found, Write, Writes, prepare
from megarl.checkpoint_engine.wire import Places


class Begun(NamedTuple):
    """Work that a GPU may still be doing.

    Attributes:
        digests: waits for the digests of what arrived, ``wire.DIGEST`` bytes for each tensor.
        found: waits for what is wrong with what was written.
    """

    digests: Callable[[], bytes]
    found: Callable[[], Found]


class BucketWrites:
    """The writes of one bucket, prepared to be made again and again.

    Args:
        places: the bucket's tensors.
        writes: of each tensor what is written of it.
    """

    def __init__(self, places: Places, writes: Sequence[Sequence[Write]]) -> None:
        self._places, self._copies = places, None
        others = [write for group in writes for write in group]
        if others and others[0].target.is_cuda:
            from megarl.checkpoint_engine.receiver.weights.gpu_copies import Copies

            self._copies = Copies(places, writes)
            others = self._copies.others
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


def _together(found: list[Found]) -> Found:
    return Found(*([name for one in found for name in one[field]] for field in range(len(Found._fields))))
