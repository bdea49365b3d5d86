# SPDX-License-Identifier: Apache-2.0
"""Answer the calls of ``SamplerProcess`` in its child process, until the parent says stop or is gone."""

import asyncio
import contextlib
import os
import pickle
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

from megarl.config import EngineConfig
from megarl.errors import MegarlError, WorkerError
from megarl.sampler.environment import prepare_environment

# The method of the last message.
STOP = "stop"


class _Server:
    """Runs each call as a task of its own: a sync arrives while ``generate`` runs."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()
        self._sampler: Any = None
        self._started = asyncio.Event()
        self._tasks: set[asyncio.Task] = set()

    async def run(self) -> None:
        """Answer calls until the parent says stop or its end of the pipe is closed."""
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        # In the loop's own thread: a thread that waits would cost a sync two switches more.
        loop.add_reader(self._connection.fileno(), self._take, ended)
        await ended
        if self._sampler is not None:
            await self._sampler.close()

    def _take(self, ended: asyncio.Future) -> None:
        """Start the call that has come."""
        try:
            number, method, arguments = self._connection.recv()
        except (EOFError, OSError):  # the parent is gone
            method = STOP
        if method == STOP:
            asyncio.get_running_loop().remove_reader(self._connection.fileno())
            ended.set_result(None)
            return
        task = asyncio.ensure_future(self._answer(number, method, arguments))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, method: str, arguments: tuple) -> None:
        reply: tuple[int, bool, Any]
        try:
            if method == "start":
                await self._start(*arguments)
                reply = (number, True, None)
            else:
                await self._started.wait()
                reply = (number, True, await getattr(self._sampler, method)(*arguments))
        except MegarlError as error:
            traceback.print_exc()
            reply = (number, False, _portable(error))
        except BaseException as error:
            traceback.print_exc()
            reply = (number, False, WorkerError(f"{method} raised {type(error).__name__}: {error}"))
        with contextlib.suppress(OSError):  # the parent is gone, and `run` sees it too
            self._connection.send(reply)

    async def _start(self, config: EngineConfig, threads: int | None, index: int) -> None:
        try:
            prepare_environment(threads)
            from megarl.sampler.vllm_sampler import VllmSampler

            self._sampler = VllmSampler(config, engine_index=index)
            await self._sampler.start()
        finally:
            self._started.set()


def _portable(error: MegarlError) -> MegarlError:
    """The error without what it was raised from, which may not be importable where it is read."""
    error.__cause__ = error.__context__ = None
    pickle.dumps(error)
    return error


if __name__ == "__main__":
    # Ctrl-C on the terminal is for the parent, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_Server(Connection(int(sys.argv[1]))).run())
    # vLLM may leave threads that would keep the process alive.
    sys.stdout.flush()
    os._exit(0)
