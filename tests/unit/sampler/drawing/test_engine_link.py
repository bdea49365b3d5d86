# SPDX-License-Identifier: Apache-2.0
"""Calls of workers: an error of one leaves no answer behind, as vLLM's executor of several would."""

import asyncio
from collections import deque
from typing import Any

import pytest

from megarl.errors import WeightSyncError, WorkerError
from megarl.sampler.drawing.engine_link import EngineLink, call_workers
from megarl.sampler.worker.answers import AnswerExtension


class Worker(AnswerExtension):
    """A worker that fails if it is told to."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def megarl_count(self, broken: list[int], number: int) -> int:
        if self.rank in broken:
            raise WeightSyncError(f"rank {self.rank} failed in call {number}")
        return number

    def megarl_crash(self) -> None:
        raise ValueError


class Engine:
    """Reads the workers' answers as ``MultiprocExecutor`` of vLLM 0.26 and 0.32 does: up to the first error."""

    errored = False

    def __init__(self) -> None:
        self.workers, self.answers = [Worker(rank) for rank in range(3)], [deque[Any]() for _ in range(3)]

    async def collective_rpc(self, method: str, args: tuple) -> list[Any]:
        for worker, answers in zip(self.workers, self.answers, strict=True):
            try:
                answers.append((True, getattr(worker, method)(*args)))
            except Exception as error:
                answers.append((False, error))
        results = []
        for answers in self.answers:
            succeeded, value = answers.popleft()
            if not succeeded:
                raise RuntimeError(f"Worker failed with error '{value}'")
            results.append(value)
        return results


def test_answers_are_those_of_their_call_after_errors_too(capfd: pytest.CaptureFixture[str]) -> None:
    engine, link = Engine(), EngineLink("sampler 0", 5.0)
    link.use(engine)
    for number, broken in enumerate([[], [0], [], [1, 2], [0, 1, 2], []]):
        call = link.rpc("megarl_count", broken, number)
        if broken:
            with pytest.raises(WeightSyncError, match=rf"^rank {broken[0]} failed in call {number}$"):
                asyncio.run(call)
        else:
            assert asyncio.run(call) == [number] * 3
    assert not any(engine.answers)
    assert "WeightSyncError: rank 1 failed in call 3" in capfd.readouterr().err  # the workers' log has the traceback
    with pytest.raises(WorkerError, match=r"^ValueError\(\)$"):
        asyncio.run(call_workers(engine, "megarl_crash", ()))
