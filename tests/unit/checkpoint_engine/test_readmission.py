# SPDX-License-Identifier: Apache-2.0
"""Check that engines come back one by one, and that the others are left alone."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from megarl.checkpoint_engine.manager import CheckpointEngineManager
from megarl.errors import WeightSyncError
from tests.unit.checkpoint_engine.test_manager import Engine, Rank, Trainer, config


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


def test_a_base_that_every_engine_reads_from_disk_is_not_sent_for_a_readmission() -> None:
    """A trainer that cannot send the base, as one of transformers' packed experts, still gets its engines back."""
    settings = config().model_copy(update={"base_weights": "disk"})
    manager = CheckpointEngineManager(Trainer(), [Engine(0, 1)], settings)
    manager.sync(1, "adapter")
    successor = Engine(0, 1)
    manager.replace(successor, "its process was killed")
    assert [report.kind for report in manager.readmit(1)] == ["adapter"] and successor.resident == 1


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_base_that_was_sent_after_all_is_sent_to_a_successor_too(interrupted: bool) -> None:
    settings = config().model_copy(update={"base_weights": "disk"})
    engine = Engine(0, 1)
    manager = CheckpointEngineManager(Trainer(), [engine], settings)
    engine.spoil = lambda receipt: replace(receipt, count=99) if interrupted else receipt
    with suppress(WeightSyncError):
        manager.sync(1, "base")
    successor = Engine(0, 1)
    manager.replace(successor, "its process was killed")
    assert [report.kind for report in manager.readmit(1)] == ["base", "adapter"] and successor.resident == 1


def test_merged_weights_of_a_readmission_come_after_the_base_they_replace() -> None:
    settings = config().model_copy(update={"base_weights": "disk", "content": "merged"})
    manager = CheckpointEngineManager(Trainer(), [Engine(0, 1)], settings)
    manager.sync(1, "merged")
    manager.refuse("the trainer went back")
    assert [report.kind for report in manager.readmit(0)] == ["base", "merged"]


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


@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize("failing", [1, 2])
def test_adapters_come_after_first_exports_that_failed(transport: str, failing: int) -> None:
    """The ranks run equally many exports, or one would wait in a collective that the others do not reach."""

    class Counting(Rank):
        begun = failing_left = 0

        def export_weights(self, adapter_only: bool) -> Iterator[tuple[str, torch.Tensor]]:
            self.begun += adapter_only
            if adapter_only and self.failing_left:
                self.failing_left -= 1
                raise MemoryError("another process held the GPU")
            yield from super().export_weights(adapter_only)

    trainer, engine = Trainer(), Engine(0, 1)
    trainer.ranks = [Counting(0), Counting(1)]
    trainer.ranks[0].failing_left = failing
    manager = CheckpointEngineManager(trainer, [engine], config(transport, timeout=10.0))
    with pytest.raises(WeightSyncError, match="trainer, transfer: another process held the GPU"):
        manager.sync(1, "adapter")
    assert [report.kind for report in manager.readmit(1)] == ["base", "adapter"] and engine.resident == 1
    assert [rank.begun for rank in trainer.ranks] == [3, 3]
    manager.sync(2, "adapter")
    assert [rank.begun for rank in trainer.ranks] == [4, 4] and engine.resident == 2
    trainer.finish().result()
