# SPDX-License-Identifier: Apache-2.0
"""Test the calls between a ``SamplerProcess`` and its child process. A sampler without an engine answers."""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path

import numpy as np
import psutil
import pytest

from megarl.checkpoint_engine.choice import Memory, Sender
from megarl.checkpoint_engine.participants import gather
from megarl.errors import ConfigError, WeightSyncError, WorkerError
from megarl.futures.answering import AWAKE_SECONDS, Answering
from megarl.sampler.child import Child
from megarl.sampler.process import SamplerProcess
from tests.unit.sampler.child import TOGETHER

ROOT = Path(__file__).parents[3]
# A limit, which a busy machine does not reach.
SECONDS = 60.0
SENDER = Sender(Memory("here", ""))
# More bytes than a pipe's buffers hold, in both directions.
CALLS, LENGTH = 4 * TOGETHER, 4000

Start = Callable[..., SamplerProcess]


class Process(SamplerProcess):
    """A ``SamplerProcess`` of another child."""

    def __init__(self, threads: int | None) -> None:
        self.name, self.receivers = "sampler 0", 1
        variables = os.environ | {"PYTHONPATH": str(ROOT)}
        self._child = Child(self.name, variables, None, module="tests.unit.sampler.child")
        self.process = self._child.process
        self._start(None, threads, 0)


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Process] = []

    def new(threads: int | None = None) -> Process:
        started.append(Process(threads))
        return started[-1]

    yield new
    for one in started:
        one.process.kill()  # before `close`, which would wait for a child that hangs
        one.close()


def test_an_engines_start_is_timed_to_its_own_end_and_not_to_when_it_is_waited_for(start: Start) -> None:
    process = start()
    assert process.start_seconds == 0.0
    assert process._timed.wait(SECONDS)  # though nobody waits for the engine
    ended = process.start_seconds
    time.sleep(0.1)
    assert process.wait().start_seconds == ended > 0.0


def test_many_large_calls_at_once_do_not_block_each_other(start: Start) -> None:
    process = start().wait()
    prompt = np.arange(LENGTH)
    futures: list[Future] = []

    def ask() -> None:
        for index in range(CALLS):
            futures.append(process.sample([prompt], [index]))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(SECONDS)
    assert not asking.is_alive(), f"the call after {len(futures)} of {CALLS} was never sent"
    assert not wait(futures, SECONDS).not_done
    assert all(np.array_equal(future.result()[0], prompt) for future in futures)


def test_a_cancelled_call_disturbs_no_other(start: Start) -> None:
    process = start().wait()
    asleep = process.sleep()
    assert asleep.cancel()
    assert process.wake().result(SECONDS) is None
    assert process.sleep().result(SECONDS) == 7
    process.sample([], [1]).cancel()
    process.process.kill()
    with pytest.raises(WorkerError, match="ended with status -9"):
        process.sleep().result(SECONDS)


@pytest.mark.parametrize(
    ("threads", "kind", "cause"), [(1, ConfigError, "no such model"), (2, WorkerError, "start raised OSError: no room")]
)
def test_every_call_says_why_the_engine_did_not_start(
    start: Start, threads: int, kind: type[Exception], cause: str
) -> None:
    process = start(threads)
    with pytest.raises(kind, match=f"^{cause}$"):
        process.places(SENDER).result(SECONDS)
    with pytest.raises(kind, match=f"^{cause}$"):
        process.wait()
    with pytest.raises(kind, match=f"^{cause}$"):
        process.wake().result(SECONDS)


def test_a_result_that_cannot_be_sent_is_an_error(start: Start) -> None:
    process = start()
    with pytest.raises(WorkerError, match="places raised "):
        process.places(SENDER).result(SECONDS)
    assert process.wake().result(SECONDS) is None


def test_a_call_after_the_end_is_an_error(start: Start) -> None:
    process = start()
    process.close()
    for call in (process.wake, lambda: process.flip(1, "adapter", "c")):
        with pytest.raises(WorkerError, match="the process of sampler 0 ended"):
            call().result(SECONDS)


def test_calls_of_a_sync_are_answered_in_any_order_and_read_by_whoever_waits(start: Start) -> None:
    process = start().wait()
    received = process.receive(b"x" * LENGTH, 100)  # a long answer, once the child may go on
    assert process.flip(1, "adapter", "c").result(SECONDS) is None
    assert not received.done()
    with pytest.raises(WeightSyncError, match=r"^adapter of version -1 is not staged$"):
        process.flip(-1, "adapter", "c").result(SECONDS)
    with pytest.raises(TimeoutError):
        received.result(0.01)
    process.wake().result(SECONDS)
    assert received.result(SECONDS) == [b"x" * LENGTH] * 100


def test_the_end_of_the_child_is_an_error_of_a_sync_that_waits_for_it(start: Start) -> None:
    process = start().wait()
    received = process.receive(b"", 1)
    killer = threading.Timer(0.2, process.process.kill)
    killer.start()
    with pytest.raises(WeightSyncError, match=r"^sampler 0, transfer: the process of sampler 0 ended with status -9$"):
        gather({"sampler 0": lambda: received}, time.monotonic() + SECONDS, "transfer")
    with pytest.raises(WorkerError, match="ended with status -9"):
        process.flip(1, "adapter", "c").result(SECONDS)


@pytest.mark.parametrize("first", ["direct", "other"])
def test_a_dead_childs_processes_are_ended_whoever_notices_its_end(
    start: Start, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    process = start().wait()
    ended = process._child._ended
    set_later = ended.set
    monkeypatch.setattr(ended, "set", lambda: (time.sleep(0.3), set_later()))  # the thread that reads comes second
    left = psutil.Process(process._child.call("spawn").result(SECONDS))
    process.process.kill()
    call = process.flip(1, "adapter", "c") if first == "direct" else process.wake()
    with pytest.raises(WorkerError, match="ended with status -9"):
        call.result(SECONDS)
    psutil.wait_procs([left], SECONDS)
    assert not left.is_running()


def test_a_sync_fails_with_its_first_participant(start: Start) -> None:
    process, failed = start().wait(), Future[None]()
    threading.Timer(0.2, failed.set_exception, [OSError("gone")]).start()
    calls = {"sampler 0": lambda: process.receive(b"", 1), "trainer": lambda: failed}
    with pytest.raises(WeightSyncError, match=r"^trainer, transfer: gone$"):
        gather(calls, time.monotonic() + SECONDS, "transfer")


def test_a_child_stays_awake_until_the_next_flip_and_not_for_long() -> None:
    server = Answering(None, None)  # type: ignore[arg-type]

    async def stay(flip: bool) -> float:
        began = time.monotonic()
        task = asyncio.ensure_future(server._stay_awake(server._flips))
        await asyncio.sleep(0)
        server._flips += flip
        await task
        return time.monotonic() - began

    assert asyncio.run(stay(False)) >= AWAKE_SECONDS
    # One try of several: a busy machine may hold it up.
    assert min(asyncio.run(stay(True)) for _ in range(20)) < AWAKE_SECONDS
