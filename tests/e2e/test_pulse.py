# SPDX-License-Identifier: Apache-2.0
"""Participants that stop, hang, die or take too long: each is named, with its log, within the configured time.

Real Ray actors without models. Every phase of a run waits in ``wait_all``, so the result holds for every phase.
"""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from megarl import progress
from megarl.controller.actors.calls import Limit, wait_all
from megarl.controller.actors.logs import logs_exceptions
from megarl.controller.actors.pulse import Participant, Watch
from megarl.errors import DataError, LostError, WorkerError
from tests.helpers.ray_cluster import local_ray

cluster = local_ray

HANG_SECONDS = 3.0


@logs_exceptions
class Member:
    """An actor with a child process, like an engine's."""

    def __init__(self, participant: Participant) -> None:
        participant.join()
        self.child = subprocess.Popen(["sleep", "1000"])

    def processes(self) -> tuple[int, int]:
        return os.getpid(), self.child.pid

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def work(self, pieces: int, seconds: float) -> None:
        for _ in range(pieces):
            progress.made()
            time.sleep(seconds / pieces)

    def fail(self, kind: str) -> None:
        print("what the process printed before")
        if kind == "exit":
            os._exit(3)
        try:
            raise ArithmeticError("the root")
        except ArithmeticError as error:
            raise (DataError if kind == "megarl" else KeyError)("the surface") from error


class Run:
    """Two participants and a watch."""

    def __init__(self, folder: Path) -> None:
        names = ["trainer rank 0", "sampler 0"]
        self.watch = Watch(names, folder / "logs", HANG_SECONDS)
        actor = ray.remote(Member).options(num_cpus=0)
        self.actors = {name: actor.remote(self.watch.participant(name, 0)) for name in names}
        self.processes = dict(zip(names, wait_all(self.call("processes"), self.watch), strict=True))
        deadline = time.monotonic() + 30
        while len(self.watch._seen) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def call(self, method: str, *args: Any) -> dict[str, Any]:
        return {name: getattr(actor, method).remote(*args) for name, actor in self.actors.items()}

    def close(self) -> None:
        for actor in self.actors.values():
            ray.kill(actor)
        self.watch.kill_left()
        self.watch.close()


@pytest.fixture
def start(cluster: None, tmp_path: Path) -> Iterator[Callable[[], Run]]:
    started: list[Run] = []

    def begin() -> Run:
        started.append(Run(tmp_path))
        return started[-1]

    yield begin
    for run in started:
        run.close()


@pytest.mark.parametrize("which", [0, 1], ids=["actor", "its child"])
def test_a_stopped_process_is_named_while_another_is_waited_for_and_is_gone_in_the_end(
    start: Callable[[], Run], which: int
) -> None:
    run = start()
    stopped = psutil.Process(run.processes["sampler 0"][which])
    stopped.suspend()
    began = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        wait_all({"trainer rank 0": run.actors["trainer rank 0"].wait.remote(60)}, run.watch, watched=["sampler 0"])
    assert HANG_SECONDS - 2 < time.monotonic() - began < HANG_SECONDS + 25
    first, last = str(caught.value).splitlines()
    assert first.startswith("sampler 0 has given no sign of life for") and "(train.hang_seconds is 3)" in first
    assert f"its process {stopped.pid}" in first and first.endswith("is stopped")
    assert last == f"log of sampler 0: {run.watch.logs / 'sampler-0.log'}"
    run.close()
    everything = [psutil.Process(pid) for pids in run.processes.values() for pid in pids if psutil.pid_exists(pid)]
    assert psutil.wait_procs(everything, timeout=10)[1] == []


def test_a_participant_that_goes_on_in_time_or_is_not_asked_for_ends_nothing(start: Callable[[], Run]) -> None:
    run = start()
    sampler = psutil.Process(run.processes["sampler 0"][0])
    sampler.suspend()
    time.sleep(HANG_SECONDS + 2)
    wait_all({"trainer rank 0": run.actors["trainer rank 0"].wait.remote(1)}, run.watch)
    sampler.resume()
    time.sleep(2.5)
    wait_all(run.call("wait", HANG_SECONDS + 1), run.watch)


def test_ranks_of_which_none_gets_on_are_lost_together_though_they_give_signs_of_life(
    start: Callable[[], Run],
) -> None:
    run = start()
    # One gets on, so the other one waits for it.
    calls = {
        name: run.actors[name].work.remote(pieces, 5) for name, pieces in (("trainer rank 0", 5), ("sampler 0", 1))
    }
    wait_all(calls, run.watch, moving=True)
    began = time.monotonic()
    with pytest.raises(LostError, match=r"has got on with the update for \d+ s \(train\.hang_seconds is 3\)") as caught:
        wait_all({name: actor.work.remote(1, 60) for name, actor in run.actors.items()}, run.watch, moving=True)
    assert caught.value.names == ("trainer rank 0", "sampler 0")
    assert HANG_SECONDS < time.monotonic() - began < HANG_SECONDS + 25


def test_a_call_that_takes_longer_than_its_limit_is_named_with_the_setting(start: Callable[[], Run]) -> None:
    run = start()
    with pytest.raises(
        WorkerError, match=r"^sampler 0 did not answer within train\.update_seconds \(1 s\)\nlog of samp"
    ):
        wait_all({"sampler 0": run.actors["sampler 0"].wait.remote(60)}, run.watch, Limit("train.update_seconds", 1))


@pytest.mark.parametrize(
    ("kind", "error", "first", "last"),
    [
        ("megarl", DataError, "the surface", "the surface"),
        ("other", WorkerError, "trainer rank 0 failed:", "ArithmeticError: the root"),
        ("exit", WorkerError, "trainer rank 0 died:", ""),
    ],
)
def test_an_error_ends_with_its_root_and_the_log_that_has_all(
    start: Callable[[], Run], kind: str, error: type[Exception], first: str, last: str
) -> None:
    run = start()
    with pytest.raises(error) as caught:
        wait_all({"trainer rank 0": run.actors["trainer rank 0"].fail.remote(kind)}, run.watch)
    file = run.watch.logs / "trainer-rank-0.log"
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(first)
    assert last in lines[-2] and lines[-1] == f"log of trainer rank 0: {file}"
    assert "what the process printed before" in file.read_text()
    if kind != "exit":
        assert "ArithmeticError: the root" in file.read_text() and "Traceback" in file.read_text()
