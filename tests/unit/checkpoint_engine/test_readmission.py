# SPDX-License-Identifier: Apache-2.0
"""Check that engines come back one by one, and that the others are left alone."""

import pytest

from megarl.checkpoint_engine.manager import CheckpointEngineManager
from megarl.errors import WeightSyncError
from tests.unit.checkpoint_engine.test_manager import Engine, Trainer, config


def test_only_stale_engines_are_readmitted_and_a_dead_ones_successor_with_them() -> None:
    engines = [Engine(0, 1), Engine(1, 2), Engine(2, 1)]
    manager = CheckpointEngineManager(Trainer(), engines, config(transport="gloo"))
    for version, kind in ((0, "base"), (1, "adapter")):
        manager.sync(version, kind)
    assert manager.readmit(1) == []
    successor = Engine(1, 2)
    manager.replace(successor, "its process was killed")
    assert manager.stale == {"sampler 1": "its process was killed"}
    with pytest.raises(WeightSyncError, match="sampler 1 was not readmitted since: its process was killed"):
        manager.sync(2, "adapter")
    checked: list[str] = []
    assert [report.kind for report in manager.readmit(1, checked.extend)] == ["base", "adapter"]
    assert checked == ["sampler 1"] and successor.readmissions == 1
    assert engines[0].readmissions == 0, "an engine that was never in doubt is left alone"
    manager.sync(2, "adapter")
    assert [engine.resident for engine in (engines[0], successor, engines[2])] == [2, 2, 2]


def test_the_successor_of_the_only_engine_gets_a_connection_of_its_own() -> None:
    """Merged weights and the base come through one connection, which was the dead engine's."""
    settings = config(transport="gloo").model_copy(update={"content": "merged", "timeout_seconds": 10.0})
    manager = CheckpointEngineManager(Trainer(), [Engine(0, 1)], settings)
    for version, kind in ((0, "base"), (1, "merged")):
        manager.sync(version, kind)
    successor = Engine(0, 1)
    manager.replace(successor, "its process was killed")
    assert [report.kind for report in manager.readmit(1)] == ["base", "merged"] and successor.resident == 1


def test_an_engine_that_fails_its_check_stays_out() -> None:
    engine = Engine(0, 1)
    manager = CheckpointEngineManager(Trainer(), [engine], config())
    manager.refuse("the canary fell")

    def check(names: list[str]) -> None:
        raise WeightSyncError(f"{names[0]} computes something else")

    with pytest.raises(WeightSyncError, match="sampler 0 computes something else"):
        manager.readmit(3, check)
    assert engine.refused == "sampler 0 computes something else" and list(manager.stale) == ["sampler 0"]
    manager.readmit(3)
    assert (engine.refused, engine.resident, manager.stale) == (None, 3, {})
