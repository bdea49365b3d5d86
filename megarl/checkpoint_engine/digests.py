# SPDX-License-Identifier: Apache-2.0
"""Digest the tensors inside a bucket: 64 bits each, computed where the bytes are.

In host memory a digest is xxh3-64, on a GPU ``splitmix.mix64``. Both ends of a transfer have the bucket in the same
kind of memory.
"""

import torch
import xxhash

from megarl.checkpoint_engine.wire import Places
from megarl.errors import WeightSyncError
from megarl.triton_support import has_triton


def digests_of(payload: torch.Tensor, places: Places) -> bytes:
    """Return the digest of each place in a bucket, ``wire.DIGEST`` bytes each.

    Args:
        payload: ``[nbytes]`` uint8, the bucket. Waits for it if it is on a GPU.
        places: the bucket's tensors.
    """
    if payload.is_cuda:
        if not has_triton():
            raise WeightSyncError("weights on a GPU need Triton for their digests; install it, or use transport 'shm'")
        from megarl.checkpoint_engine.kernels.ranges import range_digests

        return range_digests(payload, places)
    raw = payload.cpu().numpy()
    return b"".join(xxhash.xxh3_64_digest(raw[p.offset : p.offset + p.nbytes].data) for p in places)
