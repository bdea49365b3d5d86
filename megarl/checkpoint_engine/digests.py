# SPDX-License-Identifier: Apache-2.0
"""Digest the tensors inside a bucket: 64 bits each, computed where the bytes are.

In host memory a digest is xxh3-64, on a GPU ``splitmix.mix64``. Both ends of a transfer have the bucket in the same
kind of memory.
"""

from collections.abc import Callable

import torch
import xxhash

from megarl.checkpoint_engine.wire import Places
from megarl.errors import WeightSyncError
from megarl.triton_support import has_triton


def begin_digests(payload: torch.Tensor, places: Places) -> Callable[[], bytes]:
    """Begin to compute the digests of a bucket. The result waits for them; see ``digests_of``."""
    if not payload.is_cuda:
        return lambda: digests_of(payload, places)
    need_triton()
    from megarl.checkpoint_engine.kernels.ranges import range_digests

    sums = range_digests(payload, places)
    return lambda: as_bytes(sums)


def digests_of(payload: torch.Tensor, places: Places) -> bytes:
    """Return the digest of each place in a bucket, ``wire.DIGEST`` bytes each.

    Args:
        payload: ``[nbytes]`` uint8, the bucket. Waits for it if it is on a GPU.
        places: the bucket's tensors.
    """
    if payload.is_cuda:
        return begin_digests(payload, places)()
    raw = payload.cpu().numpy()
    return b"".join(xxhash.xxh3_64_digest(raw[p.offset : p.offset + p.nbytes].data) for p in places)


def as_bytes(sums: torch.Tensor) -> bytes:
    """Return digests that were formed on a GPU, int64 ``[tensors]``, ``wire.DIGEST`` bytes each."""
    return sums.cpu().numpy().tobytes()


def need_triton() -> None:
    """Raise ``WeightSyncError`` if there is no Triton, which digests on a GPU need."""
    if not has_triton():
        raise WeightSyncError("weights on a GPU need Triton for their digests; install it, or use transport 'shm'")
