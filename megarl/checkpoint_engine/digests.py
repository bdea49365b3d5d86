# SPDX-License-Identifier: Apache-2.0
"""Digest the tensors inside a bucket: 64 bits each, computed where the bytes are.

In host memory a digest is xxh3-64, on a GPU ``splitmix.mix64``. Both ends of a transfer have the bucket in the same
kind of memory.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import xxhash

from megarl.checkpoint_engine.host_copies import to_host
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

        return as_bytes(range_digests(payload, places))

    def digests() -> bytes:
        raw = payload.numpy()
        return b"".join(xxhash.xxh3_64_digest(raw[p.offset : p.offset + p.nbytes].data) for p in places)

    return digests


def as_bytes(sums: torch.Tensor, counts: Sequence[int] | None = None) -> Callable[[], bytes]:
    """Return what waits for digests that a GPU forms, and returns ``wire.DIGEST`` bytes for each tensor.

    Args:
        sums: int64 ``[ranges]``, see ``kernels.ranges``.
        counts: number of ranges of each tensor; one by default.
    """
    arrived = to_host(sums)
    return lambda: joined(arrived().numpy(), counts)


def joined(sums: np.ndarray, counts: Sequence[int] | None = None) -> bytes:
    """Return the digests of tensors from those of their ranges, both as in ``as_bytes``."""
    if counts is not None and any(count != 1 for count in counts):
        starts = np.cumsum([0, *counts[:-1]])
        sums = np.add.reduceat(sums, starts) if len(sums) else sums
    return sums.tobytes()


def need_triton() -> None:
    """Raise ``WeightSyncError`` if there is no Triton, which digests on a GPU need."""
    if not has_triton():
        raise WeightSyncError("weights on a GPU need Triton for their digests; install it, or use transport 'shm'")
