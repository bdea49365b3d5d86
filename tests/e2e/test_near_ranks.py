# SPDX-License-Identifier: Apache-2.0
"""Under Ray each engine gets its weights from the trainer rank on its GPU. Real actors and transport, without a model.

The ranks say that each is on a GPU of its own, since on one host's CPUs rank 0 would send to all.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from megarl.checkpoint_engine.choice import Memory, Sender
from megarl.checkpoint_engine.manager import CheckpointEngineManager
from megarl.config import TrainConfig
from megarl.controller.actors.direct import AnswersInOrder
from megarl.controller.actors.pulse import Watch
from megarl.controller.actors.trainer_group import TrainerGroup
from megarl.errors import WeightSyncError
from tests.helpers.ray_cluster import local_ray
from tests.unit.checkpoint_engine.test_manager import Engine, Rank, config

cluster = local_ray
GPUS = [Memory("here", "GPU-0"), Memory("there", "GPU-1")]


class NearRank(AnswersInOrder, Rank):
    """A rank on a GPU, which may be damaged."""

    damage = 0.0

    def __init__(self, rank: int) -> None:
        AnswersInOrder.__init__(self)
        Rank.__init__(self, rank)

    def place(self) -> Sender:
        return Sender(GPUS[self.rank])

    def receivers(self) -> list[int] | None:
        """Return whom it sends to; None if to nobody."""
        return None if self._outbox is None else list(self._outbox.sender._link.indices)

    def be_damaged(self) -> None:
        """Have other weights from now on."""
        self.damage = 1.0

    def export_weights(self, adapter_only: bool) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super().export_weights(adapter_only):
            yield name, tensor + self.damage


@pytest.fixture
def trainers(cluster: None, tmp_path: Path) -> Iterator[TrainerGroup]:
    """Two ranks on two hosts."""
    actors = [ray.remote(NearRank).options(num_cpus=0).remote(rank) for rank in range(2)]
    watch = Watch([], tmp_path / "logs", 60.0)
    group = TrainerGroup(actors, watch, TrainConfig())
    group.call("receivers")  # the processes have started: what a sync may take does not include that
    yield group
    for actor in actors:
        ray.kill(actor)
    watch.close()


def engines(*gpus: Memory) -> list[Any]:
    made = [Engine(index, 1) for index in range(len(gpus))]
    for engine, gpu in zip(made, gpus, strict=True):
        engine.memory = gpu
    return made


def test_ranks_send_to_the_engines_on_their_gpus_and_are_compared(trainers: TrainerGroup) -> None:
    placed = engines(*reversed(GPUS))
    manager = CheckpointEngineManager(trainers, placed, config("ipc"))
    for version, kind in ((1, "base"), (1, "adapter"), (2, "adapter")):
        report = manager.sync(version, kind)
        for engine in placed:
            [tensors] = engine.tensors.values()
            assert {name: float(tensor[9]) for name, tensor in tensors.items()} == {f"{kind}.{i}": i for i in range(6)}
    assert (report.count, [engine.resident for engine in placed]) == (6, [2, 2])
    assert trainers.call("receivers") == [[1], [0]]
    trainers.wait({"trainer rank 1": trainers.ranks[1].be_damaged.remote()})
    with pytest.raises(WeightSyncError, match=r"trainer, transfer: trainer rank 1 sent 6 tensors of .* differ; resume"):
        manager.sync(3, "adapter")
    assert [engine.resident for engine in placed] == [2, 2] and all(engine.refused for engine in placed)


def test_rank_0_sends_to_all_if_one_engine_shares_no_gpu(trainers: TrainerGroup) -> None:
    placed = engines(GPUS[1], Memory("here", "GPU-7"))
    manager = CheckpointEngineManager(trainers, placed, config("ipc"))
    assert manager.sync(4, "merged").count == 3
    assert trainers.call("receivers") == [[0, 1], None]
