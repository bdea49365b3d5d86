# SPDX-License-Identifier: Apache-2.0
"""Digest the tensors inside a bucket: 64 bits each, computed where the bytes are.

In host memory a digest is xxh3-64. On a GPU it is ``mix64``, a sum over 16-bit words, which many threads can form at
once: word w at position i adds splitmix64(i * 2^16 + w), modulo 2^64 (the finalizer of Steele et al., "Fast splittable
pseudorandom number generators", OOPSLA 2014). Both ends of a transfer have the bucket in the same kind of memory.
"""

from collections.abc import Sequence

import numpy as np
import torch
import xxhash

from megarl.checkpoint_engine.wire import Place
from megarl.errors import WeightSyncError
from megarl.triton_support import has_triton

# Multipliers and increment of splitmix64.
GAMMA, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def digests_of(payload: torch.Tensor, places: Sequence[Place]) -> bytes:
    """Return the digest of each place in a bucket, ``wire.DIGEST`` bytes each.

    Args:
        payload: ``[nbytes]`` uint8, the bucket. Waits for it if it is on a GPU.
        places: the bucket's tensors.
    """
    if payload.is_cuda:
        if not has_triton():
            raise WeightSyncError("weights on a GPU need Triton for their digests; install it, or use transport 'shm'")
        from megarl.checkpoint_engine.kernels.ranges import range_digests

        return range_digests(payload, tuple(places))
    raw = payload.cpu().numpy()
    return b"".join(xxhash.xxh3_64_digest(raw[p.offset : p.offset + p.nbytes].data) for p in places)


def mix64(words: np.ndarray) -> int:
    """Return the digest of 16-bit words ``[n]`` uint16 as a GPU forms it; the reference of the kernels."""
    with np.errstate(over="ignore"):
        z = (np.arange(words.size, dtype=np.uint64) << np.uint64(16)) + words.astype(np.uint64) + np.uint64(GAMMA)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(FIRST)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(SECOND)
        return int((z ^ (z >> np.uint64(31))).sum(dtype=np.uint64))
