# SPDX-License-Identifier: Apache-2.0
"""Exchange messages between one sender and its receivers over TCP, for transports that stay connected.

The sender listens on one address (``network``). A receiver proves with the endpoint's token that it was told of the
sender. Messages are short: headers, manifests, receipts; weights travel another way. A closed connection is a dead
process, which the other end notices at once.
"""

import contextlib
import select
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from typing import Any

from megarl.checkpoint_engine.transports.hello import accept, new_token, reach
from megarl.errors import WeightSyncError
from megarl.network import listen, own_address

# Tags of messages: bucket, end of transfer; acknowledgement, receipt, failure.
BUCKET, END, ACK, RECEIPT, FAILED = (tag.encode() for tag in "BEARF")
_HEAD = struct.Struct("<cQ")
# Bytes that are read at once.
AT_ONCE = 2**16


def message_of(tag: bytes, data: bytes) -> bytes:
    """Return a message as it travels."""
    return _HEAD.pack(tag, len(data)) + data


class Line:
    """One end of a connection."""

    def __init__(self, peer: socket.socket, name: str) -> None:
        self.socket, self._name = peer, name
        # What has come and is not yet read: messages that were sent together take one system call.
        self._held = bytearray()

    def send(self, tag: bytes, data: bytes, deadline: float) -> None:
        """Send a message. Raises ``WeightSyncError`` if the other end is gone or does not read in time."""
        self.write(message_of(tag, data), deadline)

    def write(self, messages: bytes, deadline: float) -> None:
        """Send what ``message_of`` returned, of one or more messages. Raises ``WeightSyncError`` as ``send``."""
        try:
            self.socket.settimeout(max(deadline - time.monotonic(), 1e-3))
            self.socket.sendall(messages)
        except OSError as error:
            raise WeightSyncError(f"{self._name} is gone or does not read: {error}") from error

    def receive(self, deadline: float) -> tuple[bytes, bytes]:
        """Return the next message's tag and data. Raises ``WeightSyncError`` as ``send``."""
        tag, size = _HEAD.unpack(self._exactly(_HEAD.size, deadline))
        return tag, self._exactly(size, deadline)

    @property
    def holds(self) -> bool:
        """True if something has come that is not yet read; the socket says nothing of it."""
        return bool(self._held)

    def wait(self) -> bool:
        """Wait, however long, until a message comes. Returns False if the connection is closed instead."""
        return bool(self.peek(None))

    def peek(self, seconds: float | None) -> bytes:
        """Wait so long for the next message; return its tag, or nothing if the connection is closed or none came."""
        if not self._held:
            with contextlib.suppress(OSError):  # a killed process may leave a reset connection
                self._take(seconds)
        return bytes(self._held[:1])

    def check(self) -> None:
        """Raise ``WeightSyncError`` if the other end has closed the connection."""
        poll = select.poll()
        poll.register(self.socket.fileno(), select.POLLIN)
        # A message is readable too.
        if poll.poll(0.0) and not self.wait():
            raise WeightSyncError(f"{self._name} is gone")

    def close(self) -> None:
        """Close the connection; whoever waits on it is woken."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _take(self, seconds: float | None, size: int = AT_ONCE) -> bool:
        """Wait so long for more, and hold it; return False if the connection is closed. Raises ``OSError``."""
        self.socket.settimeout(seconds)
        came = self.socket.recv(max(AT_ONCE, size))
        self._held += came
        return bool(came)

    def _exactly(self, size: int, deadline: float) -> bytes:
        try:
            while len(self._held) < size:
                if not self._take(max(deadline - time.monotonic(), 1e-3), size - len(self._held)):
                    raise WeightSyncError(f"{self._name} is gone")
        except TimeoutError as error:
            raise WeightSyncError(f"{self._name} did not answer in time") from error
        except OSError as error:
            raise WeightSyncError(f"{self._name} is gone: {error}") from error
        data = bytes(self._held[:size])
        del self._held[:size]
        return data


class Hub:
    """The sender's end of the connections to all receivers.

    Args:
        receivers: the receivers' indices.
        timeout: seconds that any wait may take.
    """

    def __init__(self, receivers: Sequence[int], timeout: float) -> None:
        self._receivers, self._timeout = receivers, timeout
        self.host, self._token = own_address(), new_token()
        self._lines: dict[int, Line] = {}
        try:
            self._listener = listen(self.host)
        except OSError as error:
            raise WeightSyncError(f"cannot listen on {self.host}: {error}") from error
        self._port = self._listener.getsockname()[1]

    def endpoint(self) -> dict[str, Any]:
        """Return what a receiver needs to connect."""
        return {"host": self.host, "port": self._port, "token": self._token, "timeout": self._timeout}

    def connect(self, deadline: float) -> None:
        """Wait until every receiver has connected. Raises ``WeightSyncError`` with those that have not."""
        while len(self._lines) < len(self._receivers):
            try:
                index, peer = accept(self._listener, self._token, self._receivers, deadline)
            except OSError as error:
                missing = ", ".join(str(i) for i in self._receivers if i not in self._lines)
                raise WeightSyncError(f"receivers {missing} did not connect in time: {error}") from error
            self._lines[index] = Line(peer, f"receiver {index}")

    def send(self, tag: bytes, data: bytes, deadline: float) -> None:
        """Send a message to all receivers. Raises ``WeightSyncError``, with the reason if a receiver gave one."""
        self.check()
        for line in self._lines.values():
            line.send(tag, data, deadline)

    def collect(self, tag: bytes, deadline: float) -> list[bytes]:
        """Wait for one message with this tag from each receiver, in the order of the receivers.

        Raises:
            WeightSyncError: a receiver failed, is gone, or did not answer in time.
        """
        answers: dict[int, bytes] = {}
        while waiting := self._lines.keys() - answers.keys():
            ready = self._readable(waiting, max(deadline - time.monotonic(), 0.0))
            if not ready:
                late = ", ".join(str(index) for index in sorted(waiting))
                raise WeightSyncError(f"receivers {late} did not answer in time")
            answers |= {index: self._message(index, tag, deadline) for index in ready}
        return [answers[index] for index in sorted(answers)]

    def check(self) -> None:
        """Raise ``WeightSyncError`` if a receiver has failed or is gone."""
        for index in self._readable(self._lines.keys(), 0.0):
            if self._lines[index].peek(1.0) in (b"", FAILED):
                self._message(index, b"", time.monotonic() + 1.0)

    def close(self) -> None:
        """Close all connections. May be called twice."""
        for line in self._lines.values():
            line.close()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _readable(self, indices: Iterable[int], seconds: float) -> list[int]:
        """Wait so long until a message has come, or until a connection is closed; return their indices."""
        lines = {index: self._lines[index] for index in indices}
        held = [index for index, line in lines.items() if line.holds]
        waiting = {line.socket.fileno(): index for index, line in lines.items() if not line.holds}
        if -1 in waiting:
            raise WeightSyncError("the sender is closed")
        poll = select.poll()  # unlike epoll, it needs no system call before the wait
        for number in waiting:
            poll.register(number, select.POLLIN)
        return held + [waiting[number] for number, _ in poll.poll(0.0 if held else seconds * 1e3)]

    def _message(self, index: int, wanted: bytes, deadline: float) -> bytes:
        tag, data = self._lines[index].receive(deadline)
        if tag == FAILED:
            raise WeightSyncError(f"receiver {index}: {data.decode(errors='replace')}")
        if tag != wanted:
            raise WeightSyncError(f"receiver {index} sent a message {tag!r} out of turn")
        return data


def open_line(endpoint: dict[str, Any], index: int) -> Line:
    """Connect a receiver to its sender. Raises ``WeightSyncError`` if it cannot be reached."""
    host, port, timeout = endpoint["host"], endpoint["port"], endpoint["timeout"]
    try:
        return Line(reach(host, port, endpoint["token"], index, timeout), "the sender")
    except OSError as error:
        raise WeightSyncError(f"receiver {index} cannot reach the sender at {host}:{port}: {error}") from error
