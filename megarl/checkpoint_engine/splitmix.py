# SPDX-License-Identifier: Apache-2.0
"""Digest 16-bit words by a sum that many threads can form at once; the kernels compute the same on a GPU.

Word w at position i adds splitmix64(i * 2^16 + w), modulo 2^64 (the finalizer of Steele et al., "Fast splittable
pseudorandom number generators", OOPSLA 2014).
"""

import numpy as np

# Multipliers and increment of splitmix64.
GAMMA, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix64(words: np.ndarray) -> int:
    """Return the digest of 16-bit words ``[n]`` uint16 as a GPU forms it; the reference of the kernels."""
    with np.errstate(over="ignore"):
        z = (np.arange(words.size, dtype=np.uint64) << np.uint64(16)) + words.astype(np.uint64) + np.uint64(GAMMA)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(FIRST)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(SECOND)
        return int((z ^ (z >> np.uint64(31))).sum(dtype=np.uint64))
