# SPDX-License-Identifier: Apache-2.0
"""Tell whether Triton kernels can be compiled here, and divide work among their programs."""

import functools
import importlib.util
from collections.abc import Sequence

import numpy as np


@functools.cache
def has_triton() -> bool:
    """Return True if Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def ceil_div(count: int, size: int) -> int:
    """Return how many pieces of ``size`` hold ``count``. Triton's own function takes the host 2 microseconds."""
    return -(-count // size)


def power_of_two(count: int) -> int:
    """Return the least power of two that is at least ``count``."""
    return 1 << max(0, count - 1).bit_length()


def program_table(sizes: Sequence[int], block: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut items into blocks.

    Returns:
        For each program the index of its item, and the index of its block in the item; int64 ``[programs]``.
    """
    counts = -(-np.asarray(sizes, dtype=np.int64) // block)
    items: np.ndarray = np.repeat(np.arange(len(counts)), counts)
    return items, np.arange(len(items)) - np.repeat(np.cumsum(counts) - counts, counts)
