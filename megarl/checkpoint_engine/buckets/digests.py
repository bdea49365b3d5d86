# SPDX-License-Identifier: Apache-2.0
"""Digest the tensors inside a bucket: 64 bits each, computed where the bytes are.

In host memory a digest is xxh3-64, on a GPU ``splitmix.mix64``. Bytes on any other device come to the host first. Both
ends of a transfer have the bucket in the same kind of memory.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from megarl.checkpoint_engine.buckets.host_copies import to_host
from megarl.checkpoint_engine.wire import Places
from megarl.errors import WeightSyncError
from megarl.triton_support import has_triton


def begin_digests(payload: torch.Tensor, places: Places) -> Callable[[], bytes]:
    """Begin to compute the digests of a bucket.

    Args:
        payload: ``[nbytes]`` uint8, the bucket.
        places: its tensors.

    Returns:
        A function that waits for the digests and returns them, ``wire.DIGEST`` bytes each.
    """
    if payload.is_cuda:
        need_triton()
        from megarl.checkpoint_engine.kernels.ranges import range_digests

        return as_bytes(to_host(range_digests(payload, places)))

    def digests() -> bytes:
        raw = payload.cpu().numpy()
        return b"".join(xxhash.xxh3_64_digest(raw[p.offset : p.offset + p.nbytes].data) for p in places)

    return digests


class RepeatedDigests:
    """Begins digests as ``begin_digests`` does, on a GPU by one CUDA graph where the same bucket comes again."""

    def __init__(self) -> None:
        self._replays: Any = None
        # What the graphs read must live as long as they do.
        self._tables: dict[Places, Any] = {}

    def __call__(self, payload: torch.Tensor, places: Places) -> Callable[[], bytes]:
        """See ``begin_digests``."""
        if not payload.is_cuda:
            return begin_digests(payload, places)
        need_triton()
        from megarl.checkpoint_engine.kernels.ranges import digests_by, known_table
        from megarl.checkpoint_engine.kernels.replays import Replays

        self._replays = self._replays or Replays()
        table = self._tables.setdefault(places, known_table(places, payload.device))
        key = payload.data_ptr(), len(payload), places
        return as_bytes(self._replays.run(key, lambda: digests_by(payload, table)))

    def capture(self) -> None:
        """Make the next digests of the same buckets cheaper; see ``Replays.capture``."""
        if self._replays:
            self._replays.capture()


def as_bytes(sums: Callable[[], torch.Tensor], starts: np.ndarray | None = None) -> Callable[[], bytes]:
    """Return what waits for digests that a GPU forms, and returns ``wire.DIGEST`` bytes for each tensor.

    Args:
        sums: waits for int64 ``[ranges]``, see ``kernels.ranges``, and returns it on the host.
        starts: see ``starts_of``; one range of each tensor by default.
    """
    return lambda: sums_of_tensors(sums().numpy(), starts).tobytes()


def starts_of(counts: Sequence[int]) -> np.ndarray | None:
    """Return the first range of each tensor, from the numbers of their ranges; None if each has one."""
    return None if all(count == 1 for count in counts) else np.cumsum([0, *counts[:-1]])


def sums_of_tensors(sums: np.ndarray, starts: np.ndarray | None) -> np.ndarray:
    """Return the digests of tensors from those of their ranges, int64; ``starts`` as ``starts_of`` returns them."""
    return sums if starts is None else np.add.reduceat(sums, starts)


def need_triton() -> None:
    """Raise ``WeightSyncError`` if there is no Triton, which digests on a GPU need."""
    if not has_triton():
        raise WeightSyncError("weights on a GPU need Triton for their digests; install it, or use transport 'shm'")
