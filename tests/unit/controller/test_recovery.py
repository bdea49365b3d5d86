# SPDX-License-Identifier: Apache-2.0
"""Test what comes back after a loss, with what weights, and how often. Real manager and transport; no actors."""

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.checkpoint_engine.manager import CheckpointEngineManager
from megarl.config import parse_config
from megarl.controller import recovery
from megarl.controller.recovery import Recovery
from megarl.errors import LostError, MegarlError, WeightSyncError, WorkerError
from tests.unit.checkpoint_engine.test_manager import Engine, Trainer, config

TOKENS = np.arange(4)


class Handle(Engine):
    """An engine as the dispatcher sees it, too; while it is dead, every call fails."""

    def __init__(self, index: int) -> None:
        super().__init__(index, 1)
        self.index, self.actor = index, 0
        self.lost: str | None = None
        self.closed = self.is_dead = False

    def receive(self, *arguments: Any) -> Any:
        if self.is_dead:
            raise WorkerError(f"{self.name} died")
        return super().receive(*arguments)


class Samplers:
    """The sampler group and its dispatcher."""

    def __init__(self, engines: list[Handle]) -> None:
        self.engines, self.dispatcher, self.scored = engines, self, list[Any]()
        self.opened: list[tuple[str, int | None]] = []
        self.failure: WorkerError | None = None

    def lose(self, engine: Handle, error: WorkerError) -> None:
        if engine.lost is None:
            engine.lost = str(error)
            self.on_lost(engine, error)  # type: ignore[attr-defined]

    def open(self, engine: Handle) -> None:
        engine.lost, engine.closed = None, False
        self.opened.append((engine.name, engine.resident))

    def fail(self, error: WorkerError) -> None:
        self.failure = error

    def check(self) -> None:
        if self.failure:
            raise self.failure

    def sent_again(self) -> int:
        return 5

    def score(self, tokens: np.ndarray, version: int, names: list[str]) -> dict[str, np.ndarray]:
        self.scored.append((version, list(names)))
        return {name: np.zeros(3) for name in names}


class Run:
    """A run's state around three engines, of which some are dead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, restarts: int = 3) -> None:
        settings = {"sampler": {"max_restarts": restarts}, "train": {"max_restarts": restarts}}
        self.engines = [Handle(index) for index in range(3)]
        self.stillborn = 0  # successors that die before they hold a version
        self.samplers, self.said, self.dead_ranks = Samplers(self.engines), list[str](), list[str]()
        self.manager = CheckpointEngineManager(Trainer(), self.engines, config())
        self.checked: list[Any] = []
        watch = SimpleNamespace(silence=lambda name: 0.0)
        self.trainers = SimpleNamespace(
            watch=watch, names=["trainer rank 0"], ranks=[None], check=lambda: None, score=lambda *_: np.zeros(3)
        )
        screen = SimpleNamespace(say=lambda text, style=None: self.said.append(text))
        self.recorder = SimpleNamespace(screen=screen, phase=lambda name: None)
        self.canary = SimpleNamespace(tokens=TOKENS, check=lambda *given: self.checked.append(given[0]))
        self.config = parse_config({"model": {"path": "m"}, "task": {"name": "arithmetic"}} | settings)
        self.updates, self.ending = 0, ""
        self.restarted: list[str] = []
        self.restarts, self.transport = {"engine": 0, "trainer": 0}, config()
        self.loans = SimpleNamespace(wanted=False, withdraw=lambda: self.restarted.append("withdrawn"))
        self.recovery = Recovery(self, self)  # type: ignore[arg-type]
        self.recovery.begin()

        def dead(actors: dict[str, Any], seconds: float, watch: Any) -> dict[str, WorkerError]:
            gone = [*self.dead_ranks, *(engine.name for engine in self.engines if engine.is_dead)]
            return {name: LostError.of([name], f"{name} is dead") for name in actors if name in gone}

        def back(state: Any) -> None:
            state.updates = 2

        monkeypatch.setattr(recovery, "dead", dead)
        monkeypatch.setattr(recovery, "go_back", back)

    def restart_engine(self, index: int) -> str:
        self.restarted.append(f"sampler {index}")
        self.stillborn -= 1
        self.engines[index].is_dead, self.engines[index].resident = self.stillborn >= 0, None
        return "successor"

    def restart_trainers(self) -> None:
        self.restarted.append("trainers")
        self.dead_ranks.clear()

    def residents(self) -> list[int | None]:
        return [engine.resident for engine in self.engines]

    def look_until(self, opened: int) -> None:
        deadline = time.monotonic() + 10
        while len(self.samplers.opened) < opened:
            self.recovery.look()
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    run = Run(monkeypatch)
    run.recovery.first_sync()
    return run


def test_a_lost_engine_comes_back_with_base_policy_and_canary_and_the_others_are_left_alone(run: Run) -> None:
    run.updates = 1
    run.recovery.sync()
    run.engines[1].is_dead = True
    run.samplers.lose(run.engines[1], WorkerError("sampler 1 died"))
    run.look_until(opened=1)
    assert run.samplers.opened == [("sampler 1", 1)] and run.samplers.scored == [(1, ["sampler 1"])]
    assert run.engines[1].actor == "successor" and [engine.readmissions for engine in run.engines] == [0, 1, 0]
    assert run.recovery.metrics() == {"engine_restarts": 1, "trainer_restarts": 0, "requests_sent_again": 5}
    assert run.recovery.metrics()["engine_restarts"] == 0
    assert "sampler 1 is lost and starts again (1 of at most 3, sampler.max_restarts)" in run.said[0]


def test_a_successor_that_dies_before_it_is_readmitted_has_a_successor_too(run: Run) -> None:
    run.stillborn = 1
    run.engines[1].is_dead = True
    run.samplers.lose(run.engines[1], WorkerError("sampler 1 died"))
    run.look_until(opened=1)
    assert run.restarted == ["sampler 1", "sampler 1"] and run.residents() == [0, 0, 0]
    assert run.recovery.metrics()["engine_restarts"] == 2


def test_a_sync_that_an_engine_did_not_survive_is_mended_for_the_others_and_the_run_goes_on(run: Run) -> None:
    run.engines[2].is_dead, run.updates = True, 1
    report = run.recovery.sync()
    assert (report.version, report.kind) == (1, "adapter")
    assert run.residents()[:2] == [1, 1] and {"sampler 0", "sampler 1"} <= {name for name, _ in run.samplers.opened}
    run.look_until(opened=3)
    run.updates = 2
    run.recovery.sync()
    assert run.residents() == [2, 2, 2] and run.restarted == ["sampler 2"]


def test_a_sync_goes_to_the_engines_that_are_there_and_waits_for_one_if_there_is_none(run: Run) -> None:
    for engine in run.engines:
        engine.is_dead = True
    run.updates = 1
    assert run.recovery.sync().version == 1
    run.look_until(opened=3)
    assert run.residents() == [1, 1, 1] and sorted(run.restarted) == [f"sampler {i}" for i in range(3)]


def test_a_sync_that_fails_though_all_live_ends_the_run(run: Run) -> None:
    run.engines[0].spoil = lambda receipt: replace(receipt, checksum="0")
    run.updates = 1
    with pytest.raises(WeightSyncError, match="checksum"):
        run.recovery.sync()
    assert run.restarted == []


def test_restarts_are_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, restarts=1)
    run.recovery.first_sync()
    run.engines[0].is_dead = True
    run.samplers.lose(run.engines[0], WorkerError("sampler 0 died"))
    run.look_until(opened=1)
    run.samplers.lose(run.engines[0], WorkerError("sampler 0 died again"))
    with pytest.raises(LostError, match=r"(?s)died again.*sampler.max_restarts \(1\) is used up"):
        run.recovery.look()


@pytest.mark.parametrize("error", [WorkerError("gloo: connection closed"), LostError("late"), WeightSyncError("cut")])
def test_trainers_go_back_and_every_engine_gets_their_version_anew(run: Run, error: MegarlError) -> None:
    run.updates = 5
    run.recovery.sync()
    run.dead_ranks = ["trainer rank 0"]
    run.recovery.restart_trainers(error)
    assert run.restarted == ["trainers"] and run.updates == 2
    with pytest.raises(WeightSyncError, match="went back to version 2"):
        run.manager.sync(3, "adapter")
    assert [report.kind for report in run.recovery.first_sync()] == ["base", "adapter"]
    assert run.residents() == [2, 2, 2] and [engine.readmissions for engine in run.engines] == [1, 1, 1]
    assert run.samplers.scored == [(2, [engine.name for engine in run.engines])] and run.checked == [2]
    assert run.recovery.metrics()["trainer_restarts"] == 1


def test_engines_that_share_the_trainers_base_start_again_with_it_and_are_not_counted(run: Run) -> None:
    run.loans.wanted = True
    run.dead_ranks = ["trainer rank 0"]
    run.recovery.restart_trainers(LostError("late"))
    assert run.restarted[0] == "withdrawn"
    assert "shared the base of trainer rank 0 (sampler.share_base)" in (run.engines[0].lost or "")
    run.recovery.first_sync()
    run.look_until(opened=3)
    assert sorted(run.restarted[1:]) == ["sampler 0", "sampler 1", "sampler 2", "trainers"]
    assert run.residents() == [2, 2, 2] and run.recovery.metrics()["engine_restarts"] == 0


def test_an_error_that_no_loss_explains_is_raised(run: Run) -> None:
    for error in (WorkerError("a bug"), MegarlError("not finite"), LostError.of(["sampler 0"], "used up")):
        with pytest.raises(type(error), match=str(error)):
            run.recovery.restart_trainers(error)
    assert run.restarted == []
    run.dead_ranks = ["trainer rank 0"]
    with pytest.raises(MegarlError, match="not finite"):  # which is not what a dead rank leads to
        run.recovery.restart_trainers(MegarlError("not finite"))


def test_trainers_are_restarted_as_often_as_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, restarts=1)
    lost = LostError.of(["trainer rank 0"], "trainer rank 0 died")
    run.recovery.restart_trainers(lost)
    with pytest.raises(LostError, match=r"(?s)trainer rank 0 died.*train.max_restarts \(1\) is used up"):
        run.recovery.restart_trainers(lost)
