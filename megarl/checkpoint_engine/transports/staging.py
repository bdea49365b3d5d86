# SPDX-License-Identifier: Apache-2.0
"""Copy buckets from another GPU's memory, beside the kernels that read the bucket before.

A copy from one GPU's memory to another's is the copy engines' work and leaves the multiprocessors to the kernels. Read
where they lie, all bytes would come through those.
"""

from contextlib import suppress
from dataclasses import dataclass

import torch


@dataclass
class _Slot:
    """One of the buffers in turn.

    Attributes:
        buffer: uint8.
        arrived: the copy into it that began last.
        read: what read it last.
    """

    buffer: torch.Tensor
    arrived: torch.Event | None = None
    read: torch.Event | None = None


class Staging:
    """Holds the bucket that kernels read and the one that arrives meanwhile, on this process's current GPU.

    Its memory, that of the two largest buckets, stays until ``clear``.

    The kernels run on the stream that is current when ``copy`` is called.
    """

    def __init__(self) -> None:
        self._slots: dict[int, _Slot] = {}
        self._stream: torch.cuda.Stream | None = None
        self._last: int | None = None
        self._before: torch.Event | None = None

    def copy(self, bucket: torch.Tensor, number: int) -> torch.Tensor:
        """Begin to copy a bucket; return the copy, which kernels on the current stream may read.

        Args:
            bucket: ``[nbytes]`` uint8 in the memory of another GPU, which this one can access.
            number: its buffer's number; that of the bucket before in the same transfer is another one.
        """
        # torch hands out streams again and again: of this priority none is one that others compute on.
        stream, kernels = self._stream or torch.cuda.Stream(priority=-1), torch.cuda.current_stream()
        self._stream = stream
        if self._last is not None:
            before = self._slots[self._last]
            before.read, self._before = kernels.record_event(), before.arrived
        slot = self._slot(number, bucket)
        if slot.read is not None:
            stream.wait_event(slot.read)
        with torch.cuda.stream(stream):
            slot.buffer[: len(bucket)].copy_(bucket, non_blocking=True)
        slot.arrived = stream.record_event()
        kernels.wait_event(slot.arrived)
        self._last = number
        return slot.buffer[: len(bucket)]

    def wait(self, last: bool) -> None:
        """Wait until the last bucket has been copied, or the one before it."""
        arrived = self._before if not last else None if self._last is None else self._slots[self._last].arrived
        if arrived is not None:
            arrived.synchronize()

    def clear(self) -> None:
        """Release the buffers, once nothing is copied any more."""
        with suppress(RuntimeError):  # the device failed, which whoever closes knows
            torch.cuda.synchronize()
        self._slots, self._last, self._before = {}, None, None

    def _slot(self, number: int, bucket: torch.Tensor) -> _Slot:
        """Return the slot of a number, with a buffer that is large enough."""
        slot = self._slots.get(number)
        if slot is None or len(slot.buffer) < len(bucket):
            torch.cuda.synchronize()  # neither a copy nor a kernel uses what the new buffer takes the place of
            slot = self._slots[number] = _Slot(bucket.new_empty(len(bucket)))
        return slot
