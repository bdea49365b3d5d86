# SPDX-License-Identifier: Apache-2.0
"""Check that a held engine begins with a whole batch, and never stays held."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.errors import WorkerError
from megarl.sampler.drawing.batching import Batching


class Engine:
    """The members of AsyncLLM that holding needs."""

    def __init__(self) -> None:
        self.unfinished, self.calls = 0, list[Any]()
        self.output_processor = SimpleNamespace(get_num_unfinished_requests=lambda: self.unfinished)

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.calls.append((mode, clear_cache))

    async def resume_generation(self) -> None:
        self.calls.append(self.unfinished)


async def arrive(engine: Engine, count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0.005)
        engine.unfinished += 1


def test_a_held_engine_begins_once_all_sequences_have_arrived() -> None:
    async def run() -> list[Any]:
        engine = Engine()
        batching = Batching(lambda: engine, 5.0)
        await batching.hold()
        await asyncio.gather(batching.release(8), arrive(engine, 8))
        return engine.calls

    # Running requests and the prefix cache stay.
    assert asyncio.run(run()) == [("keep", False), 8]


def test_a_batch_that_does_not_arrive_is_an_error_and_the_engine_goes_on() -> None:
    engine = Engine()

    async def run() -> None:
        engine.unfinished = 3
        await Batching(lambda: engine, 0.1).release(8)

    with pytest.raises(WorkerError, match=r"3 of a batch's 8 sequences arrived within 0.1 s"):
        asyncio.run(run())
    assert engine.calls == [3]
