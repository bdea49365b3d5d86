# SPDX-License-Identifier: Apache-2.0
"""Write matrices into padded buffers in host memory, and read them back."""

from collections.abc import Callable, Sequence

import torch

from megarl.checkpoint_engine.buckets.stream import is_finite
from megarl.checkpoint_engine.receiver.writers.jobs import Found, Source, Write


class HostWrites:
    """See ``jobs.Writes``."""

    def __init__(self, writes: Sequence[Write]) -> None:
        self._writes = writes

    def run(self, payload: torch.Tensor) -> Callable[[], Found]:
        """See ``jobs.Writes``. All is done when this returns."""
        found = Found([], [])
        for write in self._writes:
            target = write.target
            if write.source is None:
                target.zero_()
                if target.any():
                    found.different.append(write.name)
                continue
            matrix = matrix_of(payload, write.source)
            block = matrix.to(target.dtype) if write.scaling == 1 else (matrix.float() * write.scaling).to(target.dtype)
            if not write.held:
                rows, columns = block.shape
                target[:rows, :columns] = block
                target[rows:] = 0
                target[:rows, columns:] = 0
            if not is_finite(block):
                found.not_finite.append(write.name)
            elif not _holds(target, block):
                found.different.append(write.name)
        return lambda: found

    def capture(self) -> None:
        """Do nothing."""


def matrix_of(payload: torch.Tensor, source: Source) -> torch.Tensor:
    """Return a view of a matrix in a bucket."""
    size = source.dtype.itemsize
    flat = payload[: payload.numel() // size * size].view(source.dtype)
    return flat.as_strided(source.shape, source.strides, flat.storage_offset() + source.offset)


def _holds(buffer: torch.Tensor, block: torch.Tensor) -> bool:
    """Return True if a padded buffer holds exactly ``block``, and zeros around it."""
    rows, columns = block.shape
    inside = torch.equal(buffer[:rows, :columns], block)
    return inside and not buffer[rows:].any() and not buffer[:rows, columns:].any()
