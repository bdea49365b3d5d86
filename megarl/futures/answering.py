# SPDX-License-Identifier: Apache-2.0
"""Answer the calls that come over ``lines``: in an event loop side by side, or one after another in a thread."""

import asyncio
import contextlib
import pickle
import queue
import select
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from megarl.errors import MegarlError, WorkerError

# A reply of at most so many bytes fits into a pipe that takes any.
SHORT = 1024
# Seconds that the loop stays awake at most after weights were announced: on a GPU even all weights of 8B have come.
AWAKE_SECONDS = 0.1


class Answering:
    """Answers calls in an event loop, each in a task of its own: a sync arrives while ``generate`` runs.

    Args:
        value: returns a call's result, given its method and arguments.
        end: called when whoever calls says ``stop``, or is gone.
        stop: the method of a last message; None: there is none.

    Attributes:
        on_gpu: True if a sync may stay awake for the next one, which takes no core that an engine needs.
    """

    def __init__(
        self, value: Callable[[str, tuple], Awaitable[Any]], end: Callable[[], None], stop: str | None = None
    ) -> None:
        self._value, self._end, self._stop = value, end, stop
        self.on_gpu = False
        # Calls of ``flip`` so far.
        self._flips = 0
        self._tasks: set[asyncio.Task] = set()
        # A thread sends long ones: the loop must take calls meanwhile, or both ends would wait for each other.
        self._replies: queue.SimpleQueue[tuple[Connection, memoryview] | None] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._writer = threading.Thread(target=self._send, daemon=True)
        self._writer.start()

    def take_from(self, connection: Connection) -> None:
        """Answer what comes over a connection, through it. Called in the event loop."""
        # In the loop's own thread: a thread that waits would cost a sync two switches more.
        asyncio.get_running_loop().add_reader(connection.fileno(), self._take, connection)

    def close(self, seconds: float) -> None:
        """Let the last replies leave, for so long at most."""
        self._replies.put(None)
        self._writer.join(seconds)

    def _take(self, connection: Connection) -> None:
        """Start the call that has come."""
        try:
            number, method, arguments = connection.recv()
        except (EOFError, OSError):  # whoever called is gone
            method = None
        if method is None or method == self._stop:
            asyncio.get_running_loop().remove_reader(connection.fileno())
            self._end()
            return
        self._start_task(self._answer(connection, number, method, arguments))
        if method == "receive" and self.on_gpu:
            self._start_task(self._stay_awake(self._flips))
        self._flips += method == "flip"

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _stay_awake(self, flips: int) -> None:
        """Do not sleep until the next flip, which comes soon: to wake takes 0.1 ms, and an adapter's sync 2 ms."""
        until = time.monotonic() + AWAKE_SECONDS
        while self._flips == flips and time.monotonic() < until:
            await asyncio.sleep(0)

    async def _answer(self, connection: Connection, number: int, method: str, arguments: tuple) -> None:
        try:
            reply = ForkingPickler.dumps((number, True, await self._value(method, arguments)))
        except BaseException as error:
            traceback.print_exc()
            reply = ForkingPickler.dumps((number, False, portable(method, error)))
        if not self._sent_at_once(connection, reply):
            self._replies.put((connection, reply))

    def _sent_at_once(self, connection: Connection, reply: memoryview) -> bool:
        """Send a short reply if the pipe takes it now; a thread gets its turn only when the loop has nothing to do."""
        if len(reply) > SHORT or not self._sending.acquire(blocking=False):
            return False
        try:
            pipe = select.poll()
            pipe.register(connection, select.POLLOUT)
            if ready := bool(pipe.poll(0.0)):
                with contextlib.suppress(OSError):  # whoever called is gone, and `_take` sees it too
                    connection.send_bytes(reply)
            return ready
        finally:
            self._sending.release()

    def _send(self) -> None:
        """Send replies until there is None."""
        while (found := self._replies.get()) is not None:
            connection, reply = found
            with contextlib.suppress(OSError), self._sending:  # whoever called is gone, and `_take` sees it too
                connection.send_bytes(reply)


def answer_in_order(connection: Connection, value: Callable[[str, tuple], Any]) -> None:
    """Answer the calls of a connection one after another, until whoever calls is gone; then close it.

    Args:
        connection: brings the calls.
        value: returns a call's result, given its method and arguments.
    """
    with connection, contextlib.suppress(EOFError, OSError):
        while True:
            number, method, arguments = connection.recv()
            try:
                reply = ForkingPickler.dumps((number, True, value(method, arguments)))
            except Exception as error:
                reply = ForkingPickler.dumps((number, False, portable(method, error)))
            connection.send_bytes(reply)


def portable(method: str, error: BaseException) -> MegarlError:
    """Return a call's error without what it was raised from, which may not be importable where it is read."""
    if not isinstance(error, MegarlError):
        return WorkerError(f"{method} raised {type(error).__name__}: {error}")
    error.__cause__ = error.__context__ = None
    pickle.dumps(error)
    return error
