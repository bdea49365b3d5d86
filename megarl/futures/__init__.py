# SPDX-License-Identifier: Apache-2.0
"""Run work in threads, with its result as a future, and wait for futures, also for those that must be read."""

import os
import queue
import select
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from typing import Self, TypeVar

from megarl.errors import LostError

T = TypeVar("T")

# Seconds between two looks of ``wait_or_read`` at futures of which nothing has come.
LOOK_SECONDS = 0.5


class KeptThread:
    """A daemon thread that waits for work, so that no thread has to start, and to get ready for CUDA, for each.

    Work that comes while earlier work runs gets a thread of its own: a participant that never answers must hold up
    neither others nor the process's end.
    """

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._free = threading.Lock()
        self._started = False

    def start(self, work: Callable[[], T]) -> Future[T]:
        """Start ``work``; its result or exception as a future."""
        future: Future[T] = Future()
        if not self._free.acquire(blocking=False):
            return in_thread(work)
        self._works.put(lambda: _settle(future, work, self._free.release))
        if not self._started:
            self._started = True
            threading.Thread(target=self._run, daemon=True).start()
        return future

    def _run(self) -> None:
        while True:
            self._works.get()()


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Start ``work`` in a daemon thread of its own; its result or exception as a future."""
    future: Future[T] = Future()
    threading.Thread(target=_settle, args=(future, work), daemon=True).start()
    return future


def done(work: Callable[[], T]) -> Future[T]:
    """Do ``work`` now; its result or error as a future. What is no error, such as Ctrl-C, is raised."""
    future: Future[T] = Future()
    _do(future, work)
    return future


class ReadByWaiter(Future[T]):
    """A future that nobody settles but whoever waits for it, by ``wait_or_read``."""

    def filenos(self) -> Collection[int]:
        """Return the descriptors of which one is readable when its result may have come."""
        raise NotImplementedError

    def look(self) -> None:
        """Settle it if its result has come. Does not wait. Called when it may have, and every ``LOOK_SECONDS``."""
        raise NotImplementedError

    def result(self, timeout: float | None = None) -> T:
        """See ``concurrent.futures.Future``."""
        if not self.done():
            wait_or_read([self], timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See ``concurrent.futures.Future``."""
        if not self.done():
            wait_or_read([self], timeout)
        return super().exception(0)


class Joined(ReadByWaiter[T]):
    """One future for several that are read by whoever waits: their results made one, or the error of one that failed.

    Args:
        calls: the futures, which nobody else waits for.
        join: makes one result of theirs, which are in the order of ``calls``. What it raises is the error.
    """

    def __init__(self, calls: Sequence[ReadByWaiter], join: Callable[[list], T]) -> None:
        super().__init__()
        self._calls, self._join = calls, join

    def filenos(self) -> Collection[int]:
        """See ``ReadByWaiter``."""
        return [number for call in self._calls if not call.done() for number in call.filenos()]

    def look(self) -> None:
        """See ``ReadByWaiter``."""
        for call in self._calls:
            if not call.done():
                call.look()
        ended = [call for call in self._calls if call.done()]
        if errors := [error for call in ended if (error := call.exception())]:
            # Another one's may only follow from a loss. Rank 0 waits for the others more often than they for it.
            self.set_exception(next((one for one in errors if isinstance(one, LostError)), errors[-1]))
        elif len(ended) == len(self._calls):
            _do(self, lambda: self._join([call.result() for call in ended]))


def wait_or_read(
    futures: Iterable[Future], seconds: float | None, enough: Callable[[], bool] | None = None
) -> tuple[set[Future], set[Future]]:
    """Wait for all futures or for the first that fails; return those that are done, and the others.

    Args:
        futures: of any kind; a ``ReadByWaiter`` is read.
        seconds: how long to wait at most; None is without end.
        enough: returns True if no other one need be waited for; asked at once, and when one may be done.
    """
    waiting = set(futures)
    # One that another thread reads rings too: it may read what this one waits for.
    read = [future for future in waiting if isinstance(future, ReadByWaiter)]
    if not read and enough is None:
        found = wait(waiting, seconds, FIRST_EXCEPTION)
        return found.done, found.not_done
    until = float("inf") if seconds is None else time.monotonic() + seconds
    with _Bell(waiting) as bell:
        while True:
            for future in read:
                if not future.done():
                    future.look()
            done = {future for future in waiting if future.done()}
            failed = any(not future.cancelled() and Future.exception(future) for future in done)
            left = until - time.monotonic()
            if failed or done == waiting or left <= 0.0 or (enough and enough()):
                return done, waiting - done
            bell.wait({number for one in read if not one.done() for number in one.filenos()}, min(left, LOOK_SECONDS))


class _Bell:
    """Rings when one of some futures is done, for a thread that waits for descriptors."""

    def __init__(self, futures: Iterable[Future]) -> None:
        self._futures = list(futures)
        self._number = os.eventfd(0, os.EFD_NONBLOCK) if self._futures else -1
        # Held while it rings: its number may be another file's once it is closed.
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        for future in self._futures:
            future.add_done_callback(self._ring)
        return self

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            if self._number >= 0:
                os.close(self._number)
                self._number = -1

    def wait(self, numbers: Iterable[int], seconds: float) -> None:
        """Wait so long until it has rung, or one of the descriptors is readable or closed."""
        poll = select.poll()
        for number in {*numbers, self._number} - {-1}:
            poll.register(number, select.POLLIN)
        poll.poll(seconds * 1e3)
        if self._number >= 0:
            with suppress(BlockingIOError):  # it has not rung
                os.eventfd_read(self._number)

    def _ring(self, future: Future) -> None:
        with self._lock:
            if self._number >= 0:
                os.eventfd_write(self._number, 1)


def results(futures: Sequence[Future[T]], seconds: float, look: Callable[[], None]) -> list[T]:
    """Wait for all futures; return their results in order.

    Args:
        futures: what to wait for.
        seconds: how often to look.
        look: called as often; what it raises ends the wait.

    Raises:
        Exception: the first that a future raises, without waiting for the others.
    """
    pending = set(futures)
    while pending:
        done, pending = wait(pending, seconds, FIRST_EXCEPTION)
        for future in done:
            future.result()
        look()
    return [future.result() for future in futures]


def finished(futures: Sequence[Future[T]], seconds: float) -> list[tuple[Future[T], T]]:
    """Return those that are done, with their results; wait at most ``seconds`` for the first. Raises as ``results``."""
    done = wait(futures, seconds, FIRST_COMPLETED).done if futures else ()
    return [(future, future.result()) for future in futures if future in done]


def _do(future: Future[T], work: Callable[[], T]) -> None:
    """Do ``work`` in the caller's thread, and give its result or error to a future. What is no error is raised."""
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)


def _settle(future: Future[T], work: Callable[[], T], before: Callable[[], None] = lambda: None) -> None:
    """Run ``work``, then ``before``, and give its outcome to a future."""
    try:
        result = work()
    except BaseException as error:
        before()
        future.set_exception(error)
    else:
        before()
        future.set_result(result)
