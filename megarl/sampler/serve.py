# SPDX-License-Identifier: Apache-2.0
"""Answer the calls of ``sampler.child.Child`` in the child process, until the parent says stop or is gone."""

import asyncio
import os
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from megarl.config import EngineConfig
from megarl.futures.answering import Answering, portable
from megarl.sampler.environment import prepare_environment, resolve_device

# The method of the last message.
STOP = "stop"
# Seconds that the last replies may take to leave.
LEAVE_SECONDS = 5.0


class _Server:
    """Runs the calls that come through some pipes. A call is answered through its own."""

    def __init__(self, *connections: Connection) -> None:
        self._connections = connections
        self._sampler: Any = None
        self._started, self._ended = asyncio.Event(), asyncio.Event()
        self._failure: BaseException | None = None
        self._answering = Answering(self._value, self._ended.set, STOP)

    async def run(self) -> None:
        """Answer calls until the parent says stop or its end of a pipe is closed."""
        for connection in self._connections:
            self._answering.take_from(connection)
        await self._ended.wait()
        if self._sampler is not None:
            await self._sampler.close()
        self._answering.close(LEAVE_SECONDS)

    async def _value(self, method: str, arguments: tuple) -> Any:
        """Return a call's result; raise why the engine did not start, if it did not."""
        if method == "start":
            return await self._start(*arguments)
        await self._started.wait()
        if self._failure is not None:
            raise portable("start", self._failure)
        return await getattr(self._sampler, method)(*arguments)

    async def _start(self, config: EngineConfig, threads: int | None, index: int, loan: bytes = b"") -> None:
        try:
            prepare_environment(threads)
            from megarl.sampler.vllm_sampler import VllmSampler

            self._sampler = VllmSampler(config, engine_index=index)
            await self._sampler.start(loan)
            self._answering.on_gpu = resolve_device(config.device) == "cuda"
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._started.set()


if __name__ == "__main__":
    # Ctrl-C on the terminal is for the parent, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_Server(*(Connection(int(number)) for number in sys.argv[1:])).run())
    # vLLM may leave threads that would keep the process alive.
    sys.stdout.flush()
    os._exit(0)
