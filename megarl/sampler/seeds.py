# SPDX-License-Identifier: Apache-2.0
"""Make seeds of samples."""

import xxhash


def seed_from(*parts: int) -> int:
    """Return a 31-bit seed that depends on all parts. vLLM adds the sample's index to it."""
    return xxhash.xxh3_64_intdigest(repr(parts).encode()) >> 33
