# SPDX-License-Identifier: Apache-2.0
"""Run work in threads, with its result as a future, and wait for futures."""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from typing import TypeVar

T = TypeVar("T")


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
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
    return future


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
