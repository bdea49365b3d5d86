# SPDX-License-Identifier: Apache-2.0
"""Plan buckets from tensor sizes. Pure and lazy: the stream may be of unknown length."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

# Offsets are multiples of this, so that every dtype can view the bucket's bytes and copies are vectorised.
ALIGNMENT = 64


def plan_buckets(items: Iterable[T], nbytes: Callable[[T], int], limit: int) -> Iterator[list[tuple[T, int]]]:
    """Cut a stream into buckets, in order.

    Args:
        items: items to be placed.
        nbytes: size of one item in bytes.
        limit: bytes that a bucket may hold. A larger item gets a bucket of its own.

    Yields:
        ``[(item, byte offset), ...]``: never empty; offsets are multiples of ``ALIGNMENT``.
    """
    bucket: list[tuple[T, int]] = []
    end = 0
    for item in items:
        size = nbytes(item)
        offset = aligned(end)
        if bucket and offset + size > limit:
            yield bucket
            bucket, offset = [], 0
        bucket.append((item, offset))
        end = offset + size
    if bucket:
        yield bucket


def aligned(offset: int) -> int:
    """Return the first multiple of ``ALIGNMENT`` at or after ``offset``."""
    return -(-offset // ALIGNMENT) * ALIGNMENT
