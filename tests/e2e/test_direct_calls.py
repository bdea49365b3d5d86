# SPDX-License-Identifier: Apache-2.0
"""Calls over an actor's own connection end as those through Ray do: with a result, an error, a death or a silence."""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
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
NAME = "trainer rank 0"


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

    def end(self) -> None:
        os._exit(3)

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

    def __init__(self, kind: type, watch: Watch) -> None:
        self.watch, self._kind, self.direct = watch, kind, DirectActor(NAME, watch)
        self.start()

    def start(self) -> None:
        actor = ray.remote(self._kind).options(num_cpus=0, max_concurrency=1 if self._kind is Rank else 100)
        self.actor = actor.remote(self.watch.participant(NAME, 0))

    def __call__(self, method: str, *arguments: Any) -> Future:
        return self.direct.call(self.actor, method, *arguments)

    def through_ray(self, method: str, *arguments: Any) -> Any:
        [result] = wait_all({NAME: getattr(self.actor, method).remote(*arguments)}, self.watch)
        return result


@pytest.fixture
def start(cluster: None, tmp_path: Path) -> Iterator[Callable[[type], Called]]:
    watch = Watch([NAME], tmp_path / "logs", HANG_SECONDS)
    started: list[Called] = []

    def begin(kind: type) -> Called:
        started.append(Called(kind, watch))
        return started[-1]

    yield begin
    for one in started:
        ray.kill(one.actor)
    watch.kill_left()
    watch.close()


def test_calls_of_both_ways_take_turns_where_they_must(start: Callable[[type], Called]) -> None:
    rank = start(Rank)
    rank.through_ray("ping")
    first = rank("work", "direct", 1.0)
    time.sleep(0.3)
    done = rank.through_ray("work", "through Ray", 0.0)
    assert done == ["direct begins", "direct ends", "through Ray begins", "through Ray ends"]
    assert first.result(60.0) == done[:2]
    assert Joined([rank("work", "a", 0.0), rank("work", "b", 0.0)], len).result(60.0) == 2


def test_what_is_not_in_turn_overtakes(start: Callable[[type], Called]) -> None:
    rank = start(Rank)
    slow = rank("work", "slow", 5.0)
    assert rank.through_ray("process") and not slow.done()
    assert slow.result(60.0)[-1] == "slow ends"


def test_an_error_has_the_path_of_the_log_which_has_its_traceback(start: Callable[[type], Called]) -> None:
    rank = start(Rank)
    file = rank.watch.logs / "trainer-rank-0.log"
    with pytest.raises(WeightSyncError) as caught:
        rank("fail", WeightSyncError("out of luck")).result(60.0)
    assert str(caught.value) == f"out of luck\nlog of {NAME}: {file}"
    with pytest.raises(WorkerError, match=r"^trainer rank 0: fail raised KeyError: 'x'\nlog of"):
        rank("fail", KeyError("x")).result(60.0)
    assert "KeyError: 'x'" in file.read_text() and "Traceback" in file.read_text()


def test_a_dead_process_is_lost_and_its_successor_is_called_next(start: Callable[[type], Called]) -> None:
    rank = start(Rank)
    waiting = rank("work", "long", 60.0)
    psutil.Process(rank.through_ray("process")).kill()
    with pytest.raises(LostError, match=f"^{NAME} (died|did not answer)") as caught:
        waiting.result(60.0)
    assert caught.value.names == (NAME,)
    with pytest.raises(LostError):
        rank("work", "short", 0.0).result(60.0)
    rank.start()
    assert rank("work", "short", 0.0).result(60.0) == ["short begins", "short ends"]
    with pytest.raises(LostError, match=NAME):
        rank("end").result(60.0)


def test_a_living_actor_is_connected_anew_once_its_connection_has_ended(start: Callable[[type], Called]) -> None:
    rank = start(Rank)
    with pytest.raises(LostError, match=f"^{NAME} has closed its connection"):
        rank("end_answers").result(60.0)
    assert rank("work", "a", 0.0).result(60.0) == ["a begins", "a ends"]
    # Ended while nobody waited.
    unread = rank("end_answers")
    file = rank.watch.logs / "trainer-rank-0.log"
    deadline = time.monotonic() + 30
    while file.read_text().count("cannot pickle") < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.2)
    assert len(rank("work", "b", 0.0).result(60.0)) == 4
    assert isinstance(unread.exception(60.0), LostError)


def test_a_stopped_process_is_named_while_it_is_waited_for(start: Callable[[type], Called]) -> None:
    rank = start(Rank)
    rank("work", "short", 0.0).result(60.0)
    deadline = time.monotonic() + 30
    while not rank.watch._seen:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    stopped = psutil.Process(rank.through_ray("process"))
    stopped.suspend()
    time.sleep(0.5)  # its threads stop one after the other
    began = time.monotonic()
    with pytest.raises(LostError, match=r"has given no sign of life for \d+ s \(train\.hang_seconds is 3\)"):
        rank("work", "more", 0.0).result(60.0)
    assert HANG_SECONDS - 2 < time.monotonic() - began < HANG_SECONDS + 25
    # A rank that waits for it is not blamed, though its log is there.
    other = start(Rank)
    (rank.watch.logs / "trainer-rank-1.log").touch()
    with pytest.raises(LostError) as caught:
        DirectActor("trainer rank 1", rank.watch, [NAME]).call(other.actor, "work", "long", 60.0).result(60.0)
    assert caught.value.names == (NAME,) and "trainer rank 1" not in str(caught.value)
    stopped.resume()


def test_calls_of_an_asynchronous_actor_overlap_and_their_answers_may_be_long(start: Callable[[type], Called]) -> None:
    engine = start(Engine)
    waiting = [engine("wait", size) for size in (1, 3_000_000)]
    engine("release").result(60.0)
    assert [len(one.result(60.0)) for one in waiting] == [1, 3_000_000]


def test_nobody_else_is_answered(start: Callable[[type], Called], monkeypatch: pytest.MonkeyPatch) -> None:
    rank = start(Rank)
    [place] = wait_all({NAME: rank.actor.open_place.remote(ray.util.get_node_ip_address())}, rank.watch)
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
