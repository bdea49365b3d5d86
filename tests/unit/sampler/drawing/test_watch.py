# SPDX-License-Identifier: Apache-2.0
"""Wait for an engine that answers, fails, dies or does not answer."""

import asyncio
from types import SimpleNamespace

import pytest

from megarl.errors import WorkerError
from megarl.sampler.drawing.watch import answer_of


def engine(*, errored: bool = False) -> SimpleNamespace:
    return SimpleNamespace(errored=errored)


async def answer(seconds: float, value: object) -> object:
    await asyncio.sleep(seconds)
    if isinstance(value, Exception):
        raise value
    return value


def test_an_answer_comes_through_however_long_it_takes():
    assert asyncio.run(answer_of(answer(0.5, 7), engine(), "sampler 0")) == 7
    assert asyncio.run(answer_of(answer(0, 7), engine(), "sampler 0", timeout=5)) == 7


def test_what_the_engine_raised_comes_through_even_if_it_died_of_it():
    for errored in (False, True):
        with pytest.raises(ValueError, match="its own words"):
            asyncio.run(answer_of(answer(0.05, ValueError("its own words")), engine(errored=errored), "sampler 0"))


def test_death_ends_the_wait_and_the_call():
    async def run() -> None:
        watched, call = engine(), asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.3, lambda: setattr(watched, "errored", True))
        with pytest.raises(WorkerError, match="engine process of sampler 3 died"):
            await asyncio.wait_for(answer_of(call, watched, "sampler 3", timeout=300), 5)
        assert call.cancelled()

    asyncio.run(run())


def test_silence_ends_with_the_timeout_and_a_caller_that_leaves_cancels():
    with pytest.raises(TimeoutError, match=r"sampler 0 gave no answer within 0\.3 s"):
        asyncio.run(asyncio.wait_for(answer_of(asyncio.Event().wait(), engine(), "sampler 0", timeout=0.3), 5))

    async def leave() -> None:
        call = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(answer_of(call, engine(), "sampler 0"))
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert call.cancelled()

    asyncio.run(leave())
