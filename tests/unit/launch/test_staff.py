# SPDX-License-Identifier: Apache-2.0
"""Test what starts again while a run is built, and the transport for where the actors are. No actors; arithmetic."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.checkpoint_engine import loan
from megarl.config import CheckpointEngineConfig
from megarl.errors import ConfigError, LostError, WorkerError
from megarl.launch.loans import Loans
from megarl.launch.placement.plan import Plan, plan_placement
from megarl.launch.staff import Staff
from megarl.launch.transport import check_transport
from megarl.sampler.engine.build import start_error
from tests.unit.launch.placement.test_plan import nodes, run

PLAN: Any = SimpleNamespace(trainer=[0, 1], engine=[1, 0], beside=lambda engine: [])
NAMES = ["trainer rank 0", "trainer rank 1", "sampler 0", "sampler 1"]


class Building(Staff):
    """Two ranks and two engines whose building goes as it is told: what each wait raises, then it succeeds."""

    def __init__(self, *outcomes: Exception, restarts: int = 3, shares: bool = False) -> None:
        config = run(train__max_restarts=restarts, sampler__max_restarts=restarts)
        self.outcomes, self.begun, self.said = list(outcomes), list[str](), list[str]()
        self._train, self._most, self.restarts = config.train, restarts, {"engine": 0, "trainer": 0}
        lends = [SimpleNamespace(lend_base=SimpleNamespace(remote=lambda rank=rank: f"loan {rank}")) for rank in (0, 1)]
        self.trainers: Any = SimpleNamespace(names=NAMES[:2], ranks=lends)
        engines = [SimpleNamespace(name=name, index=index, actor=actor("")) for index, name in enumerate(NAMES[2:])]
        self.samplers: Any = SimpleNamespace(engines=engines)
        self._bundles = dict.fromkeys(NAMES, 0)
        self.loans = Loans(PLAN, self._lent_by, wanted=shares, seconds=config.train.build_seconds)
        self.begin()
        self._screen: Any = SimpleNamespace(say=lambda text, style: self.said.append(text))

    def _new_ranks(self) -> None:
        self.begun.append("ranks")
        self.loans.withdraw()

    def _new_engine(self, index: int) -> Any:
        self.begun.append(NAMES[2 + index])
        return actor(f"sampler {index}'s second")

    def _begin_build(self) -> dict[str, Any]:
        self.begun.append("build")
        return dict.fromkeys(NAMES[:2], "build")

    def _wait(self, calls: dict[str, Any], *, told: bool = False) -> list[Any]:
        if self.outcomes:
            raise self.outcomes.pop(0)
        return [{call: 1.0} for call in calls.values()]


def actor(name: str) -> Any:
    """Return an engine's actor, whose start gives what it was called with."""
    return SimpleNamespace(start=SimpleNamespace(remote=lambda *given: " ".join([name, "start", *map(str, given)])))


def lost(*names: str) -> LostError:
    return LostError.of(names, f"{', '.join(names)} died")


def test_what_is_lost_while_building_starts_again_beside_the_rest() -> None:
    staff, checks = Building(lost("sampler 1"), lost("trainer rank 1", "sampler 0")), list[int]()
    seconds = staff.build(lambda: checks.append(1))
    assert staff.begun == ["build", "sampler 1", "ranks", "sampler 0", "build"] and len(checks) == 2
    assert staff.restarts == {"engine": 2, "trainer": 1}
    assert sorted(seconds) == sorted(NAMES) and seconds["sampler 1"] == {"sampler 1's second start": 1.0}
    assert seconds["sampler 0"] == {"sampler 0's second start": 1.0}
    assert staff.said[0] == "sampler 1 is lost while building, and starts again: sampler 1 died"


def test_engines_that_share_the_base_start_after_the_ranks_and_again_after_new_ones() -> None:
    staff = Building(shares=True)
    assert staff._starting == {}
    seconds = staff.build(lambda: None)
    assert list(seconds) == NAMES and seconds["sampler 1"] == {" start {'loan 0': 1.0}": 1.0}
    assert staff.loans.of(0) == [{"loan 1": 1.0}] and staff.begun == ["build"]

    class LostLater(Building):
        """Loses a rank while the engines start."""

        def _wait(self, calls: dict[str, Any], *, told: bool = False) -> list[Any]:
            if "sampler 0" in calls and "ranks" not in self.begun:
                raise lost("trainer rank 1")
            return super()._wait(calls, told=told)

    later = LostLater(shares=True)
    assert sorted(later.build(lambda: None)) == sorted(NAMES)
    assert later.begun == ["build", "ranks", "sampler 0", "sampler 1", "build"]
    waiting = Loans(PLAN, staff._lent_by, wanted=True, seconds=0.0)
    with pytest.raises(WorkerError, match=r"sampler 1 waited for the trainer, whose base it shares, longer than train"):
        waiting.of(1)


def test_an_engine_of_several_gpus_gets_the_loans_of_their_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loan, "exported", lambda whole: b"")
    layout = {"parallel__tensor": 2, "parallel__data": 2, "sampler__engines": 2, "sampler__parallel__tensor": 2}
    plan = plan_placement(run(**layout, sampler__share_gpus=True), nodes(4))

    def ask(rank: int) -> bytes:
        held = loan.Held(f"rank {rank}", (2, 2), (slice(None), slice(None)), torch.zeros(2, 2))
        return loan.lend([held], "cpu").to_bytes()

    loans = Loans(plan, ask, wanted=True, seconds=0.0)
    loans.allow()
    given = [[one.tensors[0].name for one in loan.loans_of(loans.of(engine)[0])] for engine in (0, 1)]
    assert given == [["rank 0", "rank 1"], ["rank 2", "rank 3"]]


@pytest.mark.parametrize(
    ("error", "restarts", "message"),
    [
        (lost("sampler 0"), 0, r"^sampler 0 died$"),
        (lost("trainer rank 0"), 0, r"^trainer rank 0 died$"),
        (WorkerError("the model does not fit"), 3, "the model does not fit"),
    ],
)
def test_a_build_ends_by_errors_and_when_no_restart_is_left(error: Exception, restarts: int, message: str) -> None:
    staff = Building(error, restarts=restarts)
    with pytest.raises(WorkerError, match=message):
        staff.build(lambda: None)
    assert staff.begun == ["build"]
    staff = Building(lost("sampler 0"), lost("sampler 0"), restarts=1)
    with pytest.raises(LostError, match=r"not started again: sampler\.max_restarts \(1\) is used up"):
        staff.build(lambda: None)


def test_a_limit_that_building_exceeded_is_not_waited_for_again() -> None:
    staff = Building(lost("sampler 0"))
    staff._train = staff._train.model_copy(update={"build_seconds": 0.0})
    with pytest.raises(LostError, match=r"^sampler 0 died$"):
        staff.build(lambda: None)


def moved(plan: Plan) -> Plan:
    """Return the plan with the engines on another node."""
    [other] = nodes(0)
    at = [replace(other, id="another") if index in plan.engine else node for index, node in enumerate(plan.nodes)]
    return replace(plan, nodes=at)


def test_a_transport_of_one_host_is_refused_between_nodes_and_auto_follows_the_actors() -> None:
    plan = plan_placement(run(parallel__data=2), nodes(0, cpus=3))
    for name in ("shm", "ipc", "gloo", "auto"):
        check_transport(name, plan)
    with pytest.raises(ConfigError, match=r"transport is 'shm', .* rank 0 is on host0 and an engine on host0; set it"):
        check_transport("shm", moved(plan))
    staff = Building()
    for chosen, auto, names in (
        ("ipc", True, ["ipc", "gloo"]),
        ("nccl", True, ["nccl", "nccl"]),
        ("ipc", False, ["ipc", "ipc"]),
    ):
        staff._section, staff._auto = CheckpointEngineConfig(transport=chosen), auto
        used = []
        for at in (plan, moved(plan)):
            staff.places = SimpleNamespace(plan=at)  # type: ignore[assignment]
            used.append(staff.transport.transport)
        assert used == names


def test_engines_beside_trainer_ranks_get_the_weights_there_on_any_number_of_nodes() -> None:
    """On GPUs that they share, and on the CPUs of a rank's node; rank 0 may be elsewhere."""
    shared = run(parallel__data=2, sampler__engines=2, sampler__share_gpus=True)
    on_gpus = plan_placement(shared, nodes(1, 1))
    assert on_gpus.engines_apart and on_gpus.engines_beside_ranks
    own = plan_placement(run(parallel__data=2, sampler__engines=2), nodes(2, 2))
    assert own.engines_apart and not own.engines_beside_ranks
    on_cpus = plan_placement(run(parallel__data=2), nodes(0, 0, cpus=3))
    [first, second] = nodes(0, 0)
    ranks_apart = replace(on_cpus, nodes=[first, second, second])
    for plan in (on_gpus, ranks_apart):
        check_transport("ipc", plan)
        with pytest.raises(ConfigError, match="transport is 'shm'"):
            check_transport("shm", plan)
        staff = Building()
        staff.places = SimpleNamespace(plan=plan)  # type: ignore[assignment]
        for chosen, used in (("ipc", "ipc"), ("shm", "gloo")):
            staff._section, staff._auto = CheckpointEngineConfig(transport=chosen), True
            assert staff.transport.transport == used
    with pytest.raises(ConfigError, match="transport is 'ipc'"):
        check_transport("ipc", own)
    third = replace(second, id="third", name="the third")
    without_rank = replace(on_cpus, nodes=[first, second, second, third], engine=[2, 3])
    with pytest.raises(ConfigError, match=r"rank 0 is on host0 and an engine on the third; set it"):
        check_transport("ipc", without_rank)


def test_an_engine_process_that_a_signal_killed_is_told_from_one_that_raised() -> None:
    text = "Engine core initialization failed. See root cause above. Failed core proc(s): {{'EngineCore_DP0': {}}}"
    killed, raised = (start_error(1, RuntimeError(text.format(status))) for status in (-9, 1))
    assert isinstance(killed, LostError) and killed.names == ("sampler 1",)
    assert not isinstance(raised, LostError) and "sampler 1 did not start: Engine core" in str(raised)
