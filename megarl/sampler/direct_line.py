# SPDX-License-Identifier: Apache-2.0
"""Call a process over a pipe without a thread between: whoever waits for an answer reads it.

A thread that reads would have to be woken, and would have to wake the one that waits: 0.2 ms of a sync's 2.
"""

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from megarl.futures import ReadByWaiter, wait_or_read


class DirectLine:
    """One end of a pipe, and the calls over it. Any thread may call and wait; answers may come in any order.

    The process must take calls at all times, as ``serve`` does.

    Args:
        pipe: this process's end.
        death: returns why nobody answers any more, when the other end is closed.
    """

    def __init__(self, pipe: Connection, death: Callable[[], Exception]) -> None:
        self._pipe, self._death = pipe, death
        self._numbers, self._waiting = itertools.count(), dict[int, DirectCall]()
        self._sending, self._reading = threading.Lock(), threading.Lock()

    def call(self, method: str, *arguments: Any) -> "DirectCall":
        """Send a call; return what reads the answer when it is waited for."""
        one = DirectCall(self)
        number = next(self._numbers)
        self._waiting[number] = one
        try:
            with self._sending:
                self._pipe.send((number, method, arguments))
        except OSError:
            self._waiting.pop(number, None)
            fail(one, self._death())
        return one

    def fileno(self) -> int:
        """Return the descriptor that is readable when an answer has come; -1 after ``close``."""
        return -1 if self._pipe.closed else self._pipe.fileno()

    def read(self) -> None:
        """Settle the calls whose answers have come. Does not wait, and leaves it to another thread that reads."""
        if not self._reading.acquire(blocking=False):
            return
        try:
            while self._pipe.poll():
                number, succeeded, value = self._pipe.recv()
                settle(self._waiting.pop(number), succeeded, value)
        except (EOFError, OSError):
            self._fail_all()
        finally:
            self._reading.release()

    def close(self) -> None:
        """Close this end. Calls that wait fail."""
        self._pipe.close()
        self._fail_all()

    def _fail_all(self) -> None:
        while self._waiting:
            fail(self._waiting.popitem()[1], self._death())


class DirectCall(ReadByWaiter):
    """A call whose answer is read by whoever waits for it: by ``result``, ``exception`` or ``wait_or_read``."""

    def __init__(self, line: DirectLine) -> None:
        super().__init__()
        self._line = line

    def fileno(self) -> int:
        """See ``futures.ReadByWaiter``."""
        return self._line.fileno()

    def look(self) -> None:
        """See ``futures.ReadByWaiter``."""
        self._line.read()

    def result(self, timeout: float | None = None) -> Any:
        """See ``concurrent.futures.Future``."""
        if not self.done():
            wait_or_read([self], timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See ``concurrent.futures.Future``."""
        if not self.done():
            wait_or_read([self], timeout)
        return super().exception(0)


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
