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


def program_table(sizes: Sequence[int], block: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut items into blocks.

    Returns:
        For each program the index of its item, and the index of its block in the item; int64 ``[programs]``.
    """
    counts = -(-np.asarray(sizes, dtype=np.int64) // block)
    items: np.ndarray = np.repeat(np.arange(len(counts)), counts)
    return items, np.arange(len(items)) - np.repeat(np.cumsum(counts) - counts, counts)
