# SPDX-License-Identifier: Apache-2.0
"""Call a process over a pipe or a socket. A thread reads the answers, or, with none between, whoever waits for them.

Pickled tuples travel: ``(number, method, arguments)`` there, ``(number, succeeded, result or exception)`` back. Calls
overlap, and answers may come in any order. A call with number ``TOLD`` gets none. The process must take calls as they
come: one that does not read holds up whoever calls.
"""

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from megarl.futures import ReadByWaiter

F = TypeVar("F", bound=Future)

# The number of calls that nobody answers.
TOLD = 0


class Line:
    """One end of a pipe, and the calls over it whose answers have not come. Any thread may call.

    Args:
        pipe: this process's end.
        death: returns why nobody answers any more, when the other end is closed.

    Attributes:
        pipe: the same.
        ended: True once the other end was found closed: every call fails.
    """

    def __init__(self, pipe: Connection, death: Callable[[], Exception]) -> None:
        self.pipe, self._death = pipe, death
        self._numbers, self._waiting, self._lock = itertools.count(TOLD + 1), dict[int, Future](), threading.Lock()
        # Held while a call is sent, which may take long: answers are read meanwhile, and settling takes only `_lock`.
        self._sending = threading.Lock()
        self.ended = False

    def call(self, method: str, *arguments: Any) -> Future:
        """Send a call; its result or error as a future. Never waits for an answer."""
        return self._send(Future(), method, arguments)

    def tell(self, method: str | None, *arguments: Any) -> None:
        """Send a call that nobody answers. It is lost if the other end is closed."""
        with self._sending, suppress(OSError):
            self.pipe.send((TOLD, method, arguments))

    def take(self) -> None:
        """Settle the calls whose answers have come, without waiting. One thread at a time.

        Raises:
            EOFError, OSError: the other end is closed, or this one.
        """
        while self.pipe.poll():
            number, succeeded, value = self.pipe.recv()
            with self._lock:
                future = self._waiting.pop(number)
            settle(future, succeeded, value)

    def end(self) -> None:
        """Let all calls fail, those that wait and those to come."""
        with self._lock:
            self.ended = True
            left, self._waiting = self._waiting, {}
        for future in left.values():
            fail(future, self._death())

    def _send(self, future: F, method: str, arguments: tuple) -> F:
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = future
            ended = self.ended  # then nobody settles this call any more
        try:
            if not ended:
                with self._sending:
                    self.pipe.send((number, method, arguments))
        except OSError:
            ended = self.ended = True
        if ended:
            with self._lock:
                self._waiting.pop(number, None)
            fail(future, self._death())
        return future


class DirectLine(Line):
    """A line whose answers are read by whoever waits for one.

    A thread that reads would have to be woken, and would have to wake the one that waits: 0.2 ms of a sync's 2.
    """

    def __init__(self, pipe: Connection, death: Callable[[], Exception]) -> None:
        super().__init__(pipe, death)
        self._reading = threading.Lock()

    def call(self, method: str, *arguments: Any) -> "DirectCall":
        """Send a call; return what reads the answer when it is waited for."""
        return self._send(DirectCall(self), method, arguments)

    def filenos(self) -> list[int]:
        """Return the descriptor that is readable when an answer has come; none once this end is closed."""
        return [] if self.pipe.closed else [self.pipe.fileno()]

    def read(self) -> None:
        """Settle the calls whose answers have come. Does not wait, and leaves it to another thread that reads."""
        if not self._reading.acquire(blocking=False):
            return
        try:
            self.take()
        except (EOFError, OSError):
            self.end()
        finally:
            self._reading.release()


class DirectCall(ReadByWaiter):
    """A call whose answer is read by whoever waits for it: by ``result``, ``exception`` or ``wait_or_read``."""

    def __init__(self, line: DirectLine) -> None:
        super().__init__()
        self._line = line

    def filenos(self) -> list[int]:
        """See ``futures.ReadByWaiter``."""
        return self._line.filenos()

    def look(self) -> None:
        """See ``futures.ReadByWaiter``."""
        self._line.read()


def settle(future: Future, succeeded: bool, value: Any) -> None:
    """Give an answer to whoever waits for it, unless the call was cancelled."""
    if not succeeded:
        fail(future, value)
        return
    with suppress(InvalidStateError):  # it was cancelled
        future.set_result(value)


def fail(future: Future, error: BaseException) -> None:
    """Give an error to whoever waits, unless the call was cancelled or has failed already."""
    with suppress(InvalidStateError):
        future.set_exception(error)
