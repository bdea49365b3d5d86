# SPDX-License-Identifier: Apache-2.0
"""Define what is written into vLLM's tensors: matrices of a bucket, each scaled, into a buffer that it may not fill."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from megarl.checkpoint_engine.wire import listed
from megarl.errors import WeightSyncError


class Source(NamedTuple):
    """The place of a matrix in the received bytes.

    Attributes:
        bucket: index of the bucket.
        dtype: its dtype.
        offset, shape, strides: in elements of that dtype, from the bucket's begin.
    """

    bucket: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, int]
    strides: tuple[int, int]


class Write(NamedTuple):
    """Fill one buffer.

    Attributes:
        name: for messages.
        target: the buffer, ``[R, C]``; its rows are contiguous.
        source: the matrix, ``[r, c]``, r <= R, c <= C; zeros surround it. None fills the buffer with zeros.
        scaling: what the matrix is multiplied by, in float32, before it is rounded once.
        held: True if the buffer must hold the matrix already: nothing is written, both are compared.
    """

    name: str
    target: torch.Tensor
    source: Source | None
    scaling: float
    held: bool = False


class Found(NamedTuple):
    """Names of matrices with values that are not finite, and of those that their buffers do not hold exactly."""

    not_finite: list[str]
    different: list[str]

    def refuse(self, what: str) -> None:
        """Raise ``WeightSyncError`` if there is any name; ``what`` was written."""
        if self.not_finite:
            raise WeightSyncError(f"the {what} holds a value that is not finite in {listed(self.not_finite)}")
        if self.different:
            raise WeightSyncError(f"vLLM's buffers do not hold the {what} exactly in {listed(self.different)}")


class Begun(NamedTuple):
    """Work that a GPU may still be doing.

    Attributes:
        digests: waits for the digests of what arrived, ``wire.DIGEST`` bytes for each tensor.
        found: waits for what is wrong with what was written.
    """

    digests: Callable[[], bytes]
    found: Callable[[], Found]


class Writes(Protocol):
    """The writes of one bucket, prepared to be made again and again."""

    def run(self, payload: torch.Tensor) -> Callable[[], Found]:
        """Write, and read back.

        Args:
            payload: the bucket, ``[nbytes]`` uint8. A GPU reads it on the current stream.

        Returns:
            A function that waits for the device, and returns what is wrong.
        """
        ...

    def capture(self) -> None:
        """Make the next runs on the same bytes cheaper. Call it where no other thread uses the device."""
        ...
