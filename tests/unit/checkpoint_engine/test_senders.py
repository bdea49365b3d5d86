# SPDX-License-Identifier: Apache-2.0
"""Each engine gets its weights from the trainer rank on its GPU. Real transport and mixin; no GPU, no vLLM."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from megarl.checkpoint_engine.choice import Memory, Receiver
from megarl.checkpoint_engine.manager import CheckpointEngineManager
from megarl.checkpoint_engine.mixin import Sent
from megarl.checkpoint_engine.records import SENDER, Receipt
from megarl.checkpoint_engine.senders import joined_endpoint, joined_sent, senders_of
from megarl.errors import WeightSyncError
from tests.unit.checkpoint_engine.test_manager import Engine, Rank, Trainer, config

GPU0, GPU1, GPU2 = (Memory("here", f"GPU-{number}") for number in range(3))


@pytest.mark.parametrize(
    ("ranks", "receivers", "senders"),
    [
        ([GPU0, GPU1], [GPU0, GPU1], (0, 1)),
        ([GPU0, GPU1], [GPU1, GPU1, GPU0], (1, 1, 0)),
        ([GPU0, GPU1, GPU2], [GPU2], (2,)),
        ([GPU0, GPU1, GPU1], [GPU1], (1,)),  # ranks on one CPU host are alike; the first will do
        ([GPU0, GPU1], [GPU0, GPU0], ()),
        ([GPU0, GPU1], [GPU1, GPU2], ()),
        ([GPU0, GPU1], [Memory("there", "GPU-1")], ()),
        ([GPU0, GPU0], [GPU0], ()),
    ],
)
def test_the_first_rank_in_a_receivers_memory_sends_to_it_or_rank_0_to_all(ranks, receivers, senders) -> None:
    assert senders_of(ranks, [Receiver(memory) for memory in receivers]) == senders


def test_each_receiver_is_told_of_its_own_sender() -> None:
    ends = [json.dumps({"transport": "ipc", "port": port}).encode() for port in (10, 11, 12)]
    joined = json.loads(joined_endpoint(ends, (2, 1, 1)))
    assert {name: joined[name] for name in ("transport", "port")} == {"transport": "ipc", "port": 10}
    assert {index: one["port"] for index, one in joined["senders"].items()} == {"0": 12, "1": 11, "2": 11}
    assert joined_endpoint([ends[0], None], ()) == ends[0]


class Other(Rank):
    """A rank whose replica of the adapter has come to differ from rank 0's in one value."""

    def export_weights(self, adapter_only: bool) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super().export_weights(adapter_only):
            yield name, tensor + 1 if name == "adapter.3" else tensor


def placed(*memories: Memory, workers: tuple[int, ...] = ()) -> tuple[Trainer, list[Engine]]:
    """Two ranks on two GPUs, and an engine for each memory."""
    trainer = Trainer()
    trainer.memories = [GPU0, GPU1]
    engines = [Engine(index, (workers or (1,) * len(memories))[index]) for index in range(len(memories))]
    for engine, memory in zip(engines, memories, strict=True):
        engine.memory = memory
    return trainer, engines


def senders(trainer: Trainer) -> list[tuple[int, ...] | None]:
    """Return the receivers that each rank's transport is open to; None without one."""
    boxes = [rank._outbox for rank in trainer.ranks]
    return [None if box is None else tuple(box.sender._link.indices) for box in boxes]


@pytest.mark.parametrize(
    ("memories", "workers", "expected"),
    [
        ((GPU0, GPU1), (1, 2), [(0,), (1, 2)]),
        ((GPU1, GPU0), (2, 1), [(2,), (0, 1)]),
        ((GPU1,), (1,), [(), (0,)]),
        ((GPU0, GPU0), (1, 1), [(0, 1), None]),
        ((GPU0, GPU2), (1, 1), [(0, 1), None]),
    ],
)
def test_every_engine_gets_the_weights_from_its_own_rank(memories, workers, expected) -> None:
    trainer, engines = placed(*memories, workers=workers)
    manager = CheckpointEngineManager(trainer, engines, config("ipc"))
    for version, kind in ((3, "base"), (3, "adapter"), (4, "adapter"), (4, "merged")):
        report = manager.sync(version, kind)
        assert senders(trainer) == expected
        for tensors in (tensors for engine in engines for tensors in engine.tensors.values()):
            values = {name: float(tensor[0]) for name, tensor in tensors.items()}
            assert values == {f"{kind}.{index}": float(index) for index in range(report.count)}
    assert [engine.resident for engine in engines] == [4] * len(engines)
    trainer.finish().result()
    assert senders(trainer) == [None, None]


def test_a_rank_whose_weights_differ_from_rank_0s_flips_no_engine() -> None:
    trainer, engines = placed(GPU0, GPU1)
    trainer.ranks[1] = Other(1)
    manager = CheckpointEngineManager(trainer, engines, config("ipc"))
    match = (
        r"trainer rank 1 sent 6 tensors of 24000 bytes, checksum \w+, but rank 0 sent 6 of 24000, \w+: their weights"
    )
    with pytest.raises(WeightSyncError, match=match):
        manager.sync(1, "adapter")
    assert [engine.resident for engine in engines] == [None, None]
    assert all(engine.refused for engine in engines)


def test_a_failure_of_either_sender_ends_the_sync_and_the_next_connects_anew() -> None:
    def fail(receipt):
        raise OSError("out of luck")

    trainer, engines = placed(GPU0, GPU1)
    engines[1].spoil = fail
    manager = CheckpointEngineManager(trainer, engines, config("ipc", timeout=2.0))
    with pytest.raises(WeightSyncError, match="sampler 1, transfer: out of luck"):
        manager.sync(1, "adapter")
    engines[1].spoil = lambda receipt: replace(receipt)
    engines[0].open, engines[1].open = {}, {}
    engines[1].memory = GPU0  # it was started again elsewhere
    assert [report.kind for report in manager.readmit(1)] == ["base", "adapter"]
    assert senders(trainer) == [(0, 1), None]
    assert [engine.resident for engine in engines] == [1, 1]
    trainer.finish().result()


def test_a_rank_may_begin_to_send_later() -> None:
    """It has no plan yet, and the others export the adapter once."""
    trainer, [engine] = placed(GPU0)
    manager = CheckpointEngineManager(trainer, [engine], config("ipc"))
    manager.sync(1, "adapter")
    assert [rank.exported for rank in trainer.ranks] == [12, 12]
    engine.memory = GPU1
    manager.disconnect()
    manager.sync(2, "adapter")
    assert senders(trainer) == [(), (0,)]
    assert [rank.exported for rank in trainer.ranks] == [18, 18]
    assert float(engine.tensors[0]["adapter.5"][0]) == 5.0 and engine.resident == 2
    trainer.finish().result()


def test_the_slowest_rank_that_sends_tells_the_times() -> None:
    def sent(**seconds: float) -> Sent:
        return Sent(Receipt(1, "adapter", SENDER, 2, 8, "ab", seconds).to_bytes(), [b"receipt"])

    joined = joined_sent([sent(wire=1.0, hash=0.5), None, sent(wire=0.5, hash=2.0)])
    assert Receipt.from_bytes(joined.manifest).seconds == {"wire": 1.0, "hash": 2.0}
    assert joined.receipts == [b"receipt"] * 2
    alone = sent(wire=1.0)
    assert joined_sent([alone, None]) is alone
