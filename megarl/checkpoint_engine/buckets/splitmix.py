# SPDX-License-Identifier: Apache-2.0
"""Digest bytes by a sum that many threads can form at once; the kernels compute the same on a GPU.

The bytes, with zeros up to a multiple of 8, are 64-bit words. Word w at position i adds output i of the generator
splitmix64 that starts from w, modulo 2^64 (Steele et al., "Fast splittable pseudorandom number generators", OOPSLA
2014).
"""

import numpy as np

# Multipliers and increment of splitmix64.
GAMMA, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix64(data: bytes) -> int:
    """Return the digest of ``data`` as a GPU forms it; the reference of the kernels."""
    words = np.frombuffer(data + bytes(-len(data) % 8), dtype="<u8")
    with np.errstate(over="ignore"):
        z = words + (np.arange(words.size, dtype=np.uint64) + np.uint64(1)) * np.uint64(GAMMA)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(FIRST)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(SECOND)
        return int((z ^ (z >> np.uint64(31))).sum(dtype=np.uint64))
