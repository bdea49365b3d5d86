# SPDX-License-Identifier: Apache-2.0
"""Calls over an actor's own connection end as those through Ray do: with a result, an error, a death or a silence."""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import psutil
import pytest
import ray

from megarl.checkpoint_engine.transports import hello
from megarl.controller.actors.calls import wait_all
from megarl.controller.actors.direct import AnswersInOrder, AnswersTogether, DirectActor, in_turn
from megarl.controller.actors.logs import logs_exceptions
from megarl.controller.actors.pulse import Participant, Watch
from megarl.errors import LostError, WeightSyncError, WorkerError
from megarl.futures import Joined
from megarl.network import connect
from tests.helpers.ray_cluster import local_ray

cluster = local_ray

HANG_SECONDS = 3.0
LIVING = "trainer rank 0"


@logs_exceptions
class Rank(AnswersInOrder):
    """An actor as a trainer rank is."""

    def __init__(self, participant: Participant) -> None:
        super().__init__()
        participant.join()
        self.done: list[str] = []

    def ping(self) -> None:
        pass

    def process(self) -> int:
        return os.getpid()

    @in_turn
    def work(self, name: str, seconds: float) -> list[str]:
        self.done.append(f"{name} begins")
        time.sleep(seconds)
        self.done.append(f"{name} ends")
        return list(self.done)

    def fail(self, error: Exception) -> None:
        raise error

    def end_answers(self) -> None:
        """End the thread that answers, by an error that cannot travel."""
        error = WorkerError("cannot travel")
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        raise error


@logs_exceptions
class Engine(AnswersTogether):
    """An asynchronous actor as an engine is."""

    def __init__(self, participant: Participant) -> None:
        participant.join()
        super().__init__()
        self.go_on = asyncio.Event()

    async def wait(self, size: int) -> bytes:
        await self.go_on.wait()
        return b"x" * size

    async def release(self) -> None:
        self.go_on.set()


class Called:
    """An actor, and both ways to call it."""

    def __init__(self, kind: type, watch: Watch, name: str) -> None:
        self.watch, self._kind, self.name, self.direct = watch, kind, name, DirectActor(name, watch)
        self.start()

    def start(self) -> None:
        """Start the actor, or its successor."""
        self.watch.end(self.name)
        actor = ray.remote(self._kind).options(num_cpus=0, max_concurrency=1 if self._kind is Rank else 100)
        self.actor = actor.remote(self.watch.participant(self.name, 0))

    def __call__(self, method: str, *arguments: Any) -> Future:
        return self.direct.call(self.actor, method, *arguments)

    def through_ray(self, method: str, *arguments: Any) -> Any:
        [result] = wait_all({self.name: getattr(self.actor, method).remote(*arguments)}, self.watch)
        return result


@pytest.fixture(scope="module")
def start(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[type, str], Called]]:
    names = [LIVING, "other"]
    watch = Watch(names, tmp_path_factory.mktemp("calls") / "logs", HANG_SECONDS)
    started: list[Called] = []

    def begin(kind: type, name: str) -> Called:
        started.append(Called(kind, watch, name))
        return started[-1]

    yield begin
    for one in started:
        ray.kill(one.actor)
    watch.kill_left()
    watch.close()


@pytest.fixture(scope="module")
def living(start: Callable[[type, str], Called]) -> Called:
    """Return a rank that no test ends."""
    return start(Rank, LIVING)


def test_calls_of_both_ways_take_turns_where_they_must_and_others_overtake(living: Called) -> None:
    living.through_ray("ping")
    first = living("work", "direct", 2.0)
    time.sleep(0.3)
    assert living.through_ray("process") and not first.done()
    done = living.through_ray("work", "through Ray", 0.0)
    assert done == ["direct begins", "direct ends", "through Ray begins", "through Ray ends"]
    assert first.result(60.0) == done[:2]
    assert Joined([living("work", "a", 0.0), living("work", "b", 0.0)], len).result(60.0) == 2


def test_an_error_has_the_path_of_the_log_which_has_its_traceback(living: Called) -> None:
    file = living.watch.logs / "trainer-rank-0.log"
    with pytest.raises(WeightSyncError) as caught:
        living("fail", WeightSyncError("out of luck")).result(60.0)
    assert str(caught.value) == f"out of luck\nlog of {LIVING}: {file}"
    with pytest.raises(WorkerError, match=r"^trainer rank 0: fail raised KeyError: 'x'\nlog of"):
        living("fail", KeyError("x")).result(60.0)
    assert "KeyError: 'x'" in file.read_text() and "Traceback" in file.read_text()


def test_a_living_actor_is_connected_anew_once_its_connection_has_ended(living: Called) -> None:
    with pytest.raises(LostError, match=f"^{LIVING} has closed its connection"):
        living("end_answers").result(60.0)
    assert living("work", "a", 0.0).result(60.0)[-1] == "a ends"
    # Ended while nobody waited.
    unread = living("end_answers")
    file = living.watch.logs / "trainer-rank-0.log"
    deadline = time.monotonic() + 30
    while file.read_text().count("cannot pickle") < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.2)
    assert living("work", "b", 0.0).result(60.0)[-1] == "b ends"
    assert isinstance(unread.exception(60.0), LostError)


def test_nobody_else_is_answered(living: Called) -> None:
    [place] = wait_all({LIVING: living.actor.open_place.remote(ray.util.get_node_ip_address())}, living.watch)
    assert place.host == "127.0.0.1"  # the controller is on its node
    with connect(place.host, place.port, 10.0) as stranger:
        stranger.sendall(b"?" * (hello.TOKEN_BYTES + hello.NUMBER_BYTES))
        assert stranger.recv(1) == b""
    with hello.reach(place.host, place.port, place.token, 0, 10.0) as known:
        pipe = hello.as_pipe(known)
        pipe.send((1, "process", ()))
        assert pipe.recv()[:2] == (1, True)
        with pytest.raises(ConnectionRefusedError):
            connect(place.host, place.port, 10.0)


def test_a_dead_or_stopped_process_is_lost_and_its_successor_is_called_next(
    start: Callable[[type, str], Called], living: Called
) -> None:
    rank = start(Rank, "other")
    waiting = rank("work", "long", 60.0)
    psutil.Process(rank.through_ray("process")).kill()
    with pytest.raises(LostError, match=r"^other (died|did not answer)") as caught:
        waiting.result(60.0)
    assert caught.value.names == ("other",)
    with pytest.raises(LostError):
        rank("work", "short", 0.0).result(60.0)
    rank.start()
    assert rank("work", "short", 0.0).result(60.0) == ["short begins", "short ends"]

    deadline = time.monotonic() + 30
    while "other" not in rank.watch._seen:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    stopped = psutil.Process(rank.through_ray("process"))
    stopped.suspend()
    time.sleep(0.5)  # its threads stop one after the other
    began = time.monotonic()
    with pytest.raises(LostError, match=r"has given no sign of life for \d+ s \(train\.hang_seconds is 3\)"):
        rank("work", "more", 0.0).result(60.0)
    assert HANG_SECONDS - 2 < time.monotonic() - began < HANG_SECONDS + 25
    # A rank that waits for it is not blamed.
    with pytest.raises(LostError) as caught:
        DirectActor(LIVING, rank.watch, ["other"]).call(living.actor, "work", "long", 5.0).result(60.0)
    assert caught.value.names == ("other",) and LIVING not in str(caught.value)


def test_calls_of_an_asynchronous_actor_overlap_and_their_answers_may_be_long(
    start: Callable[[type, str], Called],
) -> None:
    engine = start(Engine, "other")
    waiting = [engine("wait", size) for size in (1, 3_000_000)]
    engine("release").result(60.0)
    assert [len(one.result(60.0)) for one in waiting] == [1, 3_000_000]
