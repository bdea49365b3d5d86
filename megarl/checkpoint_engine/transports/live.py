# SPDX-License-Identifier: Apache-2.0
"""Keep a transport connected: a ring of two buffers, messages beside the weights, receipts.

A transport derives both classes, and says how a buffer is made and how its bytes reach the receivers.
"""

import contextlib
import struct
import time
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from megarl.checkpoint_engine.base import Frame, Link
from megarl.checkpoint_engine.transports.channel import (
    ACK,
    BUCKET,
    END,
    FAILED,
    RECEIPT,
    Hub,
    message_of,
    open_line,
)
from megarl.errors import WeightSyncError

DEPTH = 2
# Before a bucket's header: its buffer's number, its bytes, and the bytes of what opens a new buffer.
_HEAD = struct.Struct("<IQQ")


class LiveSender:
    """Trainer half. Raises ``WeightSyncError`` after the timeout, or when a receiver failed or is gone.

    Attributes:
        transport: its name in ``base.TRANSPORTS``.
        acknowledged: True if receivers read the sender's own buffer, and say when they are done.
    """

    stays = reuses_buffers = True
    transport: str
    acknowledged: ClassVar[bool] = False

    def __init__(self, link: Link) -> None:
        self._link, self._hub = link, Hub(link.indices or range(link.receivers), link.timeout)
        self._buffers: list[torch.Tensor | None] = [None] * DEPTH
        self._news: list[bytes] = [b""] * DEPTH
        self._count = self._released = 0
        self._deadline: float | None = None
        self.forget: Callable[[int], Any] = lambda address: None

    def endpoint(self) -> dict[str, Any]:
        """Return the address of the messages, and what the transport adds."""
        return self._hub.endpoint() | {"transport": self.transport, "receivers": self._link.receivers}

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Return the older one of two buffers, once nobody reads it any more."""
        self._begin()
        number = self._count % DEPTH
        self._wait_for_readers(DEPTH - 1)
        held = self._buffers[number]
        if held is None or held.numel() < nbytes:
            if held is not None:
                self.forget(held.data_ptr())
            self._buffers[number] = held = None
            held, self._news[number] = self._allocate(number, nbytes)
            self._buffers[number] = held
        return held[:nbytes]

    def put(self, header: bytes, payload: torch.Tensor) -> None:
        """Send the bucket that ``buffer`` returned last."""
        number = self._count % DEPTH
        news, self._news[number] = self._news[number], b""
        self._settle(number, payload)
        message = _HEAD.pack(number, payload.numel(), len(news)) + news + header
        self._hub.send(BUCKET, message, self._begin())
        self._move(payload)
        self._count += 1

    def settle(self, work: torch.Event | None = None) -> None:
        """Do nothing: what ``put`` sent has left, and no event waits for a receiver."""

    def end(self, manifest: bytes) -> None:
        """Send the manifest."""
        self._hub.send(END, manifest, self._begin())

    def receipts(self) -> list[bytes]:
        """Wait for every receiver's receipt."""
        deadline = self._begin()
        self._wait_for_readers(0)
        receipts = self._hub.collect(RECEIPT, deadline)
        # The next transfer begins with the first buffer, so that small ones need no other.
        self._count, self._released, self._deadline = 0, 0, None
        return receipts

    def close(self) -> None:
        """Disconnect, and release the buffers."""
        self._hub.close()
        self._buffers = [None] * DEPTH

    def _begin(self) -> float:
        """Return the time at which the transfer must be over. It begins when this is called first."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self._link.timeout
            self._hub.connect(self._deadline)
        return self._deadline

    def _wait_for_readers(self, most: int) -> None:
        """Wait until at most so many buckets that were put may not be overwritten."""
        while self._count - self._released > most:
            if self.acknowledged:
                self._note(self._hub.collect(ACK, self._begin()))
            self._released += 1

    def _note(self, acknowledgements: list[bytes]) -> None:
        """Take note of what the receivers say when they are done with a bucket."""

    def _allocate(self, number: int, nbytes: int) -> tuple[torch.Tensor, bytes]:
        """Return a new buffer, ``[nbytes]`` uint8, and what the receivers need to open it."""
        raise NotImplementedError

    def _settle(self, number: int, payload: torch.Tensor) -> None:
        """Wait until the bytes of a bucket are in its buffer."""
        if payload.is_cuda:
            torch.cuda.current_stream().synchronize()

    def _move(self, payload: torch.Tensor) -> None:
        """Bring the bytes to the receivers, who have been told of them."""


class LiveReceiver:
    """Worker half. Raises ``WeightSyncError`` after the timeout, or when the sender is gone."""

    stays = reuses_buffers = True
    acknowledges: ClassVar[bool] = False

    def __init__(self, endpoint: dict[str, Any], index: int) -> None:
        self._timeout, self._index = endpoint["timeout"], index
        self._unread = False
        # What it says when it is done with a bucket, and whether it says so together with the receipt.
        self._done, self._owed = b"", False
        self._line = open_line(endpoint, index)

    def begins(self) -> bool:
        """Wait, however long, until a transfer begins. Returns False if the sender disconnects instead."""
        return self._line.wait()

    def take(self) -> Frame:
        """Wait for the next bucket or the manifest. The bucket before may be overwritten from now on."""
        deadline = time.monotonic() + self._timeout
        tag, message = self._line.receive(deadline)
        if tag not in (BUCKET, END):
            raise WeightSyncError(f"the sender sent a message {tag!r} out of turn")
        frame = Frame(message, None) if tag == END else self._frame(message, deadline)
        if frame.payload is not None:
            # The sender announced this bucket without an answer to the one before, which may take until now to be read.
            if self._unread:
                self._wait_until_read(False)
                self._line.send(ACK, self._done, deadline)
            self._unread = self.acknowledges
        return frame

    def _frame(self, message: bytes, deadline: float) -> Frame:
        """Return the bucket of a message."""
        number, nbytes, size = _HEAD.unpack_from(message)
        news = message[_HEAD.size : _HEAD.size + size]
        return Frame(message[_HEAD.size + size :], self._fetch(number, nbytes, news, deadline))

    def settle(self) -> None:
        """Wait until the last bucket has been read in the sender's memory; ``take`` waited for those before it.

        The sender hears of it with the receipt, so that it is woken once.
        """
        self._finish_reading()

    def answer(self, receipt: bytes) -> None:
        """Send the receipt to the sender."""
        self._finish_reading()  # ``settle`` is for buckets on a GPU
        read = message_of(ACK, self._done) if self._owed else b""
        self._owed = False
        self._line.write(read + message_of(RECEIPT, receipt), time.monotonic() + self._timeout)

    def _finish_reading(self) -> None:
        """Wait until the last bucket has been read; the sender is owed word of it."""
        if self._unread:
            self._wait_until_read(True)
            self._unread, self._owed = False, True

    def fail(self, reason: str) -> None:
        """Tell the sender, and disconnect."""
        with contextlib.suppress(WeightSyncError):
            self._line.send(FAILED, reason.encode(), time.monotonic() + 1.0)
        self.close()

    def close(self) -> None:
        """Disconnect. May be called twice."""
        self._line.close()

    def _wait_until_read(self, ended: bool) -> None:
        """Wait until the bucket before the one that was fetched last is no longer read in the sender's memory.

        Args:
            ended: there is no further bucket; wait for the one that was fetched last.
        """
        if torch.cuda.is_initialized():
            # Kernels may still wait for their turn.
            torch.cuda.current_stream().synchronize()

    def _fetch(self, number: int, nbytes: int, news: bytes, deadline: float) -> torch.Tensor:
        """Return the bytes of a bucket, ``[nbytes]`` uint8.

        Args:
            number: number of the sender's buffer.
            nbytes: bytes of the bucket.
            news: what opens the buffer, if it is a new one.
            deadline: when to give up, by ``time.monotonic``.
        """
        raise NotImplementedError
