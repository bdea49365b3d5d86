# SPDX-License-Identifier: Apache-2.0
"""Check that a sync reaches every sampler completely, or every sampler refuses. Real transports and mixin; no vLLM."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

import pytest
import torch

from megarl.checkpoint_engine.base import open_receiver
from megarl.checkpoint_engine.buckets.stream import Inbox
from megarl.checkpoint_engine.choice import Receiver, Sender, own_memory
from megarl.checkpoint_engine.manager import CheckpointEngineManager
from megarl.checkpoint_engine.mixin import CheckpointEngineMixin
from megarl.checkpoint_engine.records import Receipt
from megarl.checkpoint_engine.senders import joined_endpoint, joined_sent
from megarl.checkpoint_engine.wire import Book, Kind
from megarl.config import CheckpointEngineConfig
from megarl.errors import WeightSyncError

POOL = ThreadPoolExecutor(8)


class Rank(CheckpointEngineMixin):
    """One trainer rank with an export whose tensors can be counted."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.exported = 0
        self.version: int | None = None

    def policy_version(self) -> int:
        return self.version if self.version is not None else self.asked

    def send_weights(self, version: int, kind: Kind) -> Any:
        self.asked = version
        return super().send_weights(version, kind)

    def export_weights(self, adapter_only: bool) -> Iterator[tuple[str, torch.Tensor]]:
        for index in range(6):
            self.exported += 1
            yield f"{'adapter' if adapter_only else 'base'}.{index}", torch.full((1000,), float(index))

    def export_merged(self, changed_only: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        assert changed_only
        for index in range(3):
            self.exported += 1
            yield f"merged.{index}", torch.full((1000,), float(index))

    def export_adapter_config(self) -> dict[str, Any]:
        return {"r": 1}


class Trainer:
    """Two ranks as a ``Source``."""

    def __init__(self) -> None:
        self.ranks = [Rank(0), Rank(1)]
        self.memories = [own_memory()] * 2
        self.calls = ThreadPoolExecutor(1)  # one after the other, as an actor's

    def _all(self, method: str, *arguments: Any, join: Callable[[list], Any] = itemgetter(0)) -> Future:
        return self.calls.submit(lambda: join([getattr(rank, method)(*arguments) for rank in self.ranks[::-1]][::-1]))

    def places(self) -> Future:
        return done([Sender(place) for place in self.memories])

    def prepare(self, config: CheckpointEngineConfig, receivers: int, senders: Sequence[int]) -> Future:
        return self._all("prepare_sync", config, receivers, senders, join=partial(joined_endpoint, senders=senders))

    def send(self, version: int, kind: Kind) -> Future:
        return self._all("send_weights", version, kind, join=joined_sent)

    def finish(self) -> Future:
        return self._all("finish_sync")


class Engine:
    """A ``Sink`` whose workers really receive. ``spoil`` changes its receipts or raises."""

    def __init__(
        self, index: int, receivers: int, spoil: Callable[[Receipt], Receipt] = lambda receipt: receipt
    ) -> None:
        self.name, self.receivers, self.spoil = f"sampler {index}", receivers, spoil
        self.resident: int | None = None
        self.refused: str | None = None
        self.readmissions = 0
        self.memory = own_memory()
        self.tensors: dict[int, dict[str, torch.Tensor]] = {}
        self.open: dict[tuple[int, str], tuple[Any, Book]] = {}

    def places(self, sender: Sender) -> Future:
        return done([Receiver(self.memory)] * self.receivers)

    def receive(self, endpoint: bytes, first: int) -> Future:
        return POOL.submit(self._receive, json.loads(endpoint), first)

    def _receive(self, endpoint: dict, first: int) -> list[bytes]:
        with ThreadPoolExecutor(self.receivers) as workers:
            indices = range(first, first + self.receivers)
            return [receipt for receipt in workers.map(lambda i: self._worker(endpoint, i), indices) if receipt]

    def _worker(self, endpoint: dict, index: int) -> bytes:
        stays = {name: value for name, value in endpoint.items() if name not in ("version", "kind")}
        key = (index, str(stays))
        receiver, book = self.open.get(key) or (open_receiver(endpoint, index), Book())
        self.open[key] = receiver, book
        inbox = Inbox(receiver, index, book)
        self.tensors[index] = {name: tensor.clone() for name, tensor in inbox.tensors()}
        receipt = self.spoil(inbox.finish()[1]).to_bytes()
        if receiver.stays:
            receiver.answer(receipt)
            return b""
        receiver.close()
        return receipt

    def flip(self, version: int, kind: Kind, checksum: str) -> Future:
        self.resident = version
        return done(None)

    def refuse(self, reason: str) -> Future:
        self.refused = reason
        return done(None)

    def readmit(self) -> Future:
        self.readmissions, self.refused, self.resident = self.readmissions + 1, None, None
        return done(None)


def done(value: Any) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future


def config(transport: str = "shm", timeout: float = 20.0) -> CheckpointEngineConfig:
    return CheckpointEngineConfig(transport=transport, timeout_seconds=timeout, bucket_mib=1)


@pytest.mark.parametrize("transport", ["shm", "gloo", "ipc"])
def test_a_sync_reaches_every_worker_of_every_engine(transport: str) -> None:
    trainer, engines = Trainer(), [Engine(0, 1), Engine(1, 2)]
    manager = CheckpointEngineManager(trainer, engines, config(transport))
    report = manager.sync(4, "adapter")
    assert [engine.resident for engine in engines] == [4, 4]
    assert sorted(index for engine in engines for index in engine.tensors) == [0, 1, 2]
    for engine in engines:
        for tensors in engine.tensors.values():
            assert all(torch.equal(tensors[f"adapter.{i}"], torch.full((1000,), float(i))) for i in range(6))
    assert (report.count, report.nbytes) == (6, 24_000)
    assert list(report.seconds) == ["prepare", "transfer", "verify", "flip", "finish"]
    assert [rank.exported for rank in trainer.ranks] == [12, 12], "the export is a collective: every rank runs it whole"
    manager.sync(5, "adapter")
    assert [rank.exported for rank in trainer.ranks] == [18, 18], "an adapter is planned once"
    assert manager.sync(5, "base").kind == "base"
    assert manager.sync(5, "merged").count == 3
    assert all(set(tensors) == {"merged.0", "merged.1", "merged.2"} for tensors in engines[1].tensors.values())
    trainer.finish().result()


def test_only_adapters_come_where_receivers_wait_for_adapters() -> None:
    prepared = []

    class Counting(Trainer):
        def prepare(self, *arguments: Any) -> Future:
            prepared.append(len(kinds))
            return super().prepare(*arguments)

    kinds: list[Kind] = []
    manager = CheckpointEngineManager(Counting(), [Engine(0, 1)], config(transport="gloo"))
    for version, kind in enumerate(("base", "adapter", "adapter", "base", "adapter")):
        manager.sync(version, kind)
        kinds.append(kind)
    # Connected at the start, and again before the base that came after adapters.
    assert prepared == [0, 3]


@pytest.mark.parametrize("field", ["checksum", "count", "nbytes", "version", "receiver"])
def test_one_wrong_receipt_flips_no_engine_and_ends_all(field: str) -> None:
    def spoil(receipt: Receipt) -> Receipt:
        return replace(receipt, **{field: "00" if field == "checksum" else 99})

    engines = [Engine(0, 1), Engine(1, 1, spoil)]
    manager = CheckpointEngineManager(Trainer(), engines, config())
    with pytest.raises(WeightSyncError, match=r"receiver 1 holds .* is a worker of sampler 1|\[0, 99\]"):
        manager.sync(0, "adapter")
    assert [engine.resident for engine in engines] == [None, None]
    assert all(engine.refused for engine in engines)
    with pytest.raises(WeightSyncError, match="an earlier sync failed"):
        manager.sync(1, "adapter")


def test_an_engine_that_dies_ends_the_sync_with_its_name_and_cause() -> None:
    def die(receipt: Receipt) -> Receipt:
        raise OSError("out of luck")

    engines = [Engine(0, 1), Engine(1, 1, die)]
    with pytest.raises(WeightSyncError, match="sampler 1, transfer: out of luck"):
        CheckpointEngineManager(Trainer(), engines, config()).sync(0, "adapter")
    assert all(engine.resident is None and engine.refused for engine in engines)


def test_an_engine_that_never_answers_ends_the_sync_by_name() -> None:
    class Silent(Engine):
        def flip(self, version: int, kind: Kind, checksum: str) -> Future:
            return Future()

    engines = [Engine(0, 1), Silent(1, 1)]
    with pytest.raises(WeightSyncError, match="sampler 1: flip did not end within"):
        CheckpointEngineManager(Trainer(), engines, config(timeout=0.5)).sync(0, "adapter")
    assert all(engine.refused for engine in engines)


def test_a_trainer_that_fails_while_sending_lets_its_other_ranks_finish() -> None:
    class Odd(Rank):
        def export_weights(self, adapter_only: bool) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in super().export_weights(adapter_only):
                yield name, tensor.long() if name.endswith(str(wrong)) else tensor

    for wrong in (0, 3):
        trainer = Trainer()
        trainer.ranks[0] = Odd(0)
        with pytest.raises(WeightSyncError, match=f"trainer, transfer: tensor 'adapter.{wrong}' has dtype int64"):
            CheckpointEngineManager(trainer, [Engine(0, 1)], config(timeout=5.0)).sync(0, "adapter")
        assert [rank.exported for rank in trainer.ranks] == [12, 12]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_export_that_fails_on_any_rank_ends_the_sync_with_its_cause(rank: int) -> None:
    class Failing(Rank):
        def export_weights(self, adapter_only: bool) -> Iterator[tuple[str, torch.Tensor]]:
            yield from list(super().export_weights(adapter_only))[:3]
            raise ArithmeticError(f"tensor 3 of rank {rank}")

    trainer, engine = Trainer(), Engine(0, 1)
    trainer.ranks[rank] = Failing(rank)
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match=f"trainer, transfer: tensor 3 of rank {rank}"):
        CheckpointEngineManager(trainer, [engine], config(timeout=5.0)).sync(0, "adapter")
    assert time.monotonic() - began < 4, "the receivers' time limit ended it, not the error"
    assert engine.resident is None and engine.refused


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["adapter", "base", "merged"])
def test_weights_of_another_version_than_the_one_asked_for_are_refused(rank: int, kind: Kind) -> None:
    trainer, engine = Trainer(), Engine(0, 1)
    trainer.ranks[rank].version = 3
    with pytest.raises(WeightSyncError, match=f"rank {rank} was asked to send policy version 7, .* those of version 3"):
        CheckpointEngineManager(trainer, [engine], config()).sync(7, kind)
    assert engine.resident is None and engine.refused
    assert trainer.ranks[rank].exported == 0


def test_weights_that_move_on_after_they_were_announced_are_refused() -> None:
    class Moving(Trainer):
        def send(self, version: int, kind: Kind) -> Future:
            self.ranks[0].version = 5
            return super().send(version, kind)

    with pytest.raises(WeightSyncError, match=r"asked to send policy version 4, .* version 5"):
        CheckpointEngineManager(Moving(), [Engine(0, 1)], config(timeout=5.0)).sync(4, "adapter")


def test_what_the_trainer_sent_must_be_what_was_asked_for() -> None:
    class Old(Trainer):
        def send(self, version: int, kind: Kind) -> Future:
            return super().send(version - 1, kind)

    engine = Engine(0, 1)
    with pytest.raises(WeightSyncError, match="sent the adapter of version 2, asked for was the adapter of version 3"):
        CheckpointEngineManager(Old(), [engine], config()).sync(3, "adapter")
    assert engine.resident is None


@pytest.mark.parametrize(("version", "kind"), [(-1, "adapter"), (0, "delta"), (True, "base")])
def test_a_sync_of_nothing_known_is_refused(version: int, kind: Any) -> None:
    with pytest.raises(WeightSyncError, match=r"version is|kind is"):
        CheckpointEngineManager(Trainer(), [Engine(0, 1)], config()).sync(version, kind)


def test_sending_without_preparing_is_refused() -> None:
    with pytest.raises(WeightSyncError, match="without prepare_sync"):
        Rank().send_weights(0, "base")


def test_samplers_of_one_name_are_refused() -> None:
    with pytest.raises(WeightSyncError, match="named sampler 0, sampler 0; each needs a name of its own"):
        CheckpointEngineManager(Trainer(), [Engine(0, 1), Engine(0, 1)], config())
