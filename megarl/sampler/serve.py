# SPDX-License-Identifier: Apache-2.0
"""Answer the calls of ``sampler.child.Child`` in the child process, until the parent says stop or is gone."""

import asyncio
import contextlib
import os
import pickle
import queue
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Coroutine
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from megarl.config import EngineConfig
from megarl.errors import MegarlError, WorkerError
from megarl.sampler.environment import prepare_environment, resolve_device

# The method of the last message.
STOP = "stop"
# Seconds that the last replies may take to leave.
LEAVE_SECONDS = 5.0
# A reply of at most so many bytes fits into a pipe that takes any.
SHORT = 1024
# Seconds that the loop stays awake at most after weights were announced: a sync on a GPU is over by then.
AWAKE_SECONDS = 5e-3


class _Server:
    """Runs each call as a task of its own: a sync arrives while ``generate`` runs.

    Args:
        connections: the pipes that calls come through. A call is answered through its own.
    """

    def __init__(self, *connections: Connection) -> None:
        self._connections = connections
        self._sampler: Any = None
        # Calls of ``flip`` so far, and whether to stay awake for them: not on the cores that a CPU's engine needs.
        self._flips, self._on_gpu = 0, False
        self._started = asyncio.Event()
        self._failure: BaseException | None = None
        self._tasks: set[asyncio.Task] = set()
        # A thread sends long ones: the loop must take calls meanwhile, or parent and child would wait for each other.
        self._replies: queue.SimpleQueue[tuple[Connection, memoryview] | None] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._writer = threading.Thread(target=self._send, daemon=True)

    async def run(self) -> None:
        """Answer calls until the parent says stop or its end of a pipe is closed."""
        self._writer.start()
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        # In the loop's own thread: a thread that waits would cost a sync two switches more.
        for connection in self._connections:
            loop.add_reader(connection.fileno(), self._take, connection, ended)
        await ended
        if self._sampler is not None:
            await self._sampler.close()
        self._replies.put(None)
        self._writer.join(LEAVE_SECONDS)

    def _take(self, connection: Connection, ended: asyncio.Future) -> None:
        """Start the call that has come."""
        try:
            number, method, arguments = connection.recv()
        except (EOFError, OSError):  # the parent is gone
            method = STOP
        if method == STOP:
            asyncio.get_running_loop().remove_reader(connection.fileno())
            if not ended.done():
                ended.set_result(None)
            return
        self._start_task(self._answer(connection, number, method, arguments))
        if method == "receive" and self._on_gpu:
            self._start_task(self._stay_awake(self._flips))
        self._flips += method == "flip"

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _stay_awake(self, flips: int) -> None:
        """Do not sleep until the next flip, which comes soon: to wake takes 0.1 ms, a twentieth of a sync."""
        until = time.monotonic() + AWAKE_SECONDS
        while self._flips == flips and time.monotonic() < until:
            await asyncio.sleep(0)

    async def _answer(self, connection: Connection, number: int, method: str, arguments: tuple) -> None:
        try:
            reply = ForkingPickler.dumps((number, True, await self._value(method, arguments)))
        except BaseException as error:
            traceback.print_exc()
            reply = ForkingPickler.dumps((number, False, _portable(method, error)))
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
                with contextlib.suppress(OSError):  # the parent is gone, and `run` sees it too
                    connection.send_bytes(reply)
            return ready
        finally:
            self._sending.release()

    async def _value(self, method: str, arguments: tuple) -> Any:
        """Return a call's result; raise why the engine did not start, if it did not."""
        if method == "start":
            return await self._start(*arguments)
        await self._started.wait()
        if self._failure is not None:
            raise _portable("start", self._failure)
        return await getattr(self._sampler, method)(*arguments)

    async def _start(self, config: EngineConfig, threads: int | None, index: int, loan: bytes = b"") -> None:
        try:
            prepare_environment(threads)
            from megarl.sampler.vllm_sampler import VllmSampler

            self._sampler = VllmSampler(config, engine_index=index)
            await self._sampler.start(loan)
            self._on_gpu = resolve_device(config.device) == "cuda"
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._started.set()

    def _send(self) -> None:
        """Send replies until there is None."""
        with contextlib.suppress(OSError):  # the parent is gone, and `run` sees it too
            while (found := self._replies.get()) is not None:
                connection, reply = found
                with self._sending:
                    connection.send_bytes(reply)


def _portable(method: str, error: BaseException) -> MegarlError:
    """Return a call's error without what it was raised from, which may not be importable where it is read."""
    if not isinstance(error, MegarlError):
        return WorkerError(f"{method} raised {type(error).__name__}: {error}")
    error.__cause__ = error.__context__ = None
    pickle.dumps(error)
    return error


if __name__ == "__main__":
    # Ctrl-C on the terminal is for the parent, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_Server(*(Connection(int(number)) for number in sys.argv[1:])).run())
    # vLLM may leave threads that would keep the process alive.
    sys.stdout.flush()
    os._exit(0)
