# SPDX-License-Identifier: Apache-2.0
"""Test the calls between a ``SamplerProcess`` and its child process. A sampler without an engine answers."""

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from multiprocessing import connection
from pathlib import Path

import numpy as np
import pytest

from megarl.checkpoint_engine.choice import Memory, Sender
from megarl.errors import ConfigError, WorkerError
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
        self.name, self.receivers, self._log = "sampler 0", 1, None
        self._numbers, self._waiting, self._lock = itertools.count(), dict[int, Future](), threading.Lock()
        self._sending, self._ended = threading.Lock(), threading.Event()
        self._connection, theirs = connection.Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.sampler.child", str(theirs.fileno())],
            cwd=ROOT,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        threading.Thread(target=self._read, daemon=True).start()
        self._start(None, threads, 0)


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Process] = []

    def new(threads: int | None = None) -> Process:
        started.append(Process(threads))
        return started[-1]

    yield new
    for one in started:
        one._process.kill()  # before `close`, which would wait for a child that hangs
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
    process._process.kill()
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
    with pytest.raises(WorkerError, match="the process of sampler 0 ended"):
        process.wake().result(SECONDS)
