# SPDX-License-Identifier: Apache-2.0
"""Check what an error of a sync tells whoever reads it."""

import threading
from concurrent.futures import Future

import pytest

from megarl.checkpoint_engine.manager import CheckpointEngineManager
from megarl.checkpoint_engine.wire import Kind
from megarl.errors import WeightSyncError
from megarl.futures import done
from tests.unit.checkpoint_engine.test_manager import Engine, Trainer, config


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("receivers 1, 2 did not connect in time", "; receiver 1 is a worker of sampler 1; receiver 2 is a worker of"),
        (
            "receiver 0 is gone\nlog of trainer rank 0: /x",
            "; receiver 0 is a worker of sampler 0\nlog of trainer rank 0",
        ),
        ("receiver 7 is unknown", ""),
    ],
)
def test_an_error_that_names_a_receiver_tells_its_engine(said: str, told: str) -> None:
    class Failing(Trainer):
        def send(self, version: int, kind: Kind) -> Future:
            def fail() -> None:
                raise WeightSyncError(said)

            return done(fail)

    manager = CheckpointEngineManager(Failing(), [Engine(0, 1), Engine(1, 2)], config("ipc"))
    with pytest.raises(WeightSyncError) as caught:
        manager.sync(3, "adapter")
    first = said.partition("\n")[0]
    assert f"trainer, transfer: {first}{told}" in str(caught.value)
    assert ("worker of" in str(caught.value)) is bool(told)


class Late(Engine):
    """An engine whose workers receive, and that answers never."""

    def receive(self, endpoint: bytes, first: int) -> Future:
        super().receive(endpoint, first)
        return Future()


def test_an_engine_is_not_waited_for_if_the_trainer_has_the_receipts_of_its_workers() -> None:
    trainer, engines = Trainer(), [Engine(0, 1), Late(1, 2)]
    manager = CheckpointEngineManager(trainer, engines, config("gloo"))
    for version in (3, 4):
        assert manager.sync(version, "adapter").version == version
        assert [engine.resident for engine in engines] == [version] * 2
    trainer.finish().result()


def test_an_engine_that_brings_the_receipts_itself_is_waited_for() -> None:
    manager = CheckpointEngineManager(Trainer(), [Engine(0, 1), Late(1, 2)], config("shm", timeout=3.0))
    with pytest.raises(WeightSyncError, match="sampler 1: transfer did not end within"):
        manager.sync(3, "adapter")


def test_the_trainer_says_more_than_an_engine_that_lost_it() -> None:
    class Dying(Trainer):
        def send(self, version: int, kind: Kind) -> Future:
            sent: Future = Future()
            threading.Timer(0.1, sent.set_exception, [WeightSyncError("its process was killed")]).start()
            return sent

    class Losing(Engine):
        def receive(self, endpoint: bytes, first: int) -> Future:
            received: Future = Future()
            threading.Timer(0.05, received.set_exception, [WeightSyncError("the sender is gone")]).start()
            return received

    manager = CheckpointEngineManager(Dying(), [Losing(0, 1)], config("gloo"))
    with pytest.raises(WeightSyncError, match="trainer, transfer: its process was killed"):
        manager.sync(3, "adapter")
