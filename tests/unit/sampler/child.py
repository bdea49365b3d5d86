# SPDX-License-Identifier: Apache-2.0
"""Run ``megarl.sampler.serve`` with a sampler that has no engine; ``test_process`` starts this as a child process."""

import asyncio
import os
import sys
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from megarl.errors import ConfigError, WeightSyncError
from megarl.sampler import serve

TOGETHER = 100


class Sampler:
    """Answers when it is told to; ``sample`` as soon as ``TOGETHER`` calls have come."""

    def __init__(self) -> None:
        self.go_on, self.full, self.asked = asyncio.Event(), asyncio.Event(), 0

    async def sample(self, prompts: list[np.ndarray], seeds: list[int]) -> list[np.ndarray]:
        self.asked, full = self.asked + 1, self.full
        if self.asked % TOGETHER == 0:
            full.set()
            self.full = asyncio.Event()
        await full.wait()
        return prompts

    async def sleep(self) -> int:
        await self.go_on.wait()
        return 7

    async def wake(self) -> None:
        self.go_on.set()

    async def receive(self, endpoint: bytes, first: int) -> list[bytes]:
        await self.go_on.wait()
        return [endpoint] * first

    async def flip(self, version: int, kind: str, checksum: str) -> None:
        if version < 0:
            raise WeightSyncError(f"{kind} of version {version} is not staged")

    async def spawn(self) -> int:
        """Start a process, as vLLM does; return its number."""
        return (await asyncio.create_subprocess_exec("sleep", "1000")).pid

    async def places(self, sender: Any) -> Any:
        return lambda: None

    async def close(self) -> None:
        pass


class Server(serve._Server):
    """Starts ``Sampler``; with a number of threads it fails, as an engine does that cannot be started."""

    async def _start(self, config: Any, threads: int | None, index: int) -> None:
        if threads is None:
            self._sampler = Sampler()
            self._started.set()
            return
        sys.modules["megarl.sampler.vllm_sampler"] = Broken(threads)  # type: ignore[assignment]
        serve.prepare_environment = lambda threads: None
        await super()._start(config, threads, index)


class Broken:
    """Stands for the module ``megarl.sampler.vllm_sampler``."""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def VllmSampler(self, config: Any, engine_index: int) -> Any:
        raise ConfigError("no such model") if self.threads == 1 else OSError("no room")


if __name__ == "__main__":
    asyncio.run(Server(*(Connection(int(number)) for number in sys.argv[1:])).run())
    os._exit(0)
