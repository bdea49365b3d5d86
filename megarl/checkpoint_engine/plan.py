# SPDX-License-Identifier: Apache-2.0
"""Sizes -> buckets. Pure and lazy: a stream of tensors is cut without knowing its end."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

# Offsets are multiples of it, so that every dtype can view the bucket's bytes and copies are vectorised.
ALIGNMENT = 64


def plan_buckets(items: Iterable[T], nbytes: Callable[[T], int], limit: int) -> Iterator[list[tuple[T, int]]]:
    """Cut a stream into buckets, in order.

    Args:
        items: whatever is to be placed.
        nbytes: size of one item in bytes.
        limit: bytes that a bucket may hold; an item above it gets a bucket of its own.

    Yields:
        ``[(item, byte offset), ...]``: never empty, offsets aligned to ``ALIGNMENT``.
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
    """The next multiple of ``ALIGNMENT`` at or after ``offset``."""
    return -(-offset // ALIGNMENT) * ALIGNMENT
