# SPDX-License-Identifier: Apache-2.0
"""The order of what rank 0 asks of its own model, what it leaves for the other ranks, and what it remembers."""

import threading
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from megarl.checkpoint_engine import board as boards_of
from megarl.checkpoint_engine import weight_sync
from megarl.checkpoint_engine.board import Board
from megarl.checkpoint_engine.weight_sync import WeightSync, _AllRanks
from megarl.errors import WeightSyncError
from tests.unit.checkpoint_engine.test_manager import Engine, Rank, config


class Model:
    """Records what is called; a transfer runs until it is released."""

    def __init__(self) -> None:
        self.done, self.go_on, self.sending = [], threading.Event(), threading.Event()

    def prepare_sync(self, config, receivers, senders):
        self.done.append("prepare")

    def send_weights(self, version, kind):
        self.sending.set()
        assert self.go_on.wait(10)
        self.done.append(f"send {version}")

    def finish_sync(self):
        self.done.append("finish")


def test_a_transfer_ends_before_the_next_connection_is_made_but_can_be_closed_meanwhile():
    model = Model()
    ranks = _AllRanks(model, SimpleNamespace(alone=True, call=lambda method, arguments: 0), 10.0)
    ranks.prepare(None, 1, ()).result(10)
    send = ranks.send(1, "adapter")
    assert model.sending.wait(10)
    ranks.finish().result(10)
    prepare = ranks.prepare(None, 1, ())
    assert model.done == ["prepare", "finish"] and not prepare.done()
    model.go_on.set()
    prepare.result(10)
    send.result(10)
    assert model.done == ["prepare", "finish", "send 1", "prepare"]


def test_the_next_adapter_is_sent_at_once_where_all_are_connected():
    model = Model()
    model.go_on.set()
    ranks = _AllRanks(model, SimpleNamespace(alone=True, call=lambda method, arguments: 0), 10.0)
    model.send_weights = lambda version, kind: threading.get_ident()
    here = threading.get_ident()
    ranks.prepare(None, 1, ()).result(10)
    assert ranks.send(1, "adapter").result(10) != here  # an engine that dies before it connects is not noticed here
    assert ranks.send(2, "adapter").result(0) == here
    ranks.prepare(None, 1, ()).result(10)
    assert ranks.send(3, "adapter").result(10) != here
    model.send_weights = lambda version, kind: 1 // 0
    with pytest.raises(ZeroDivisionError):
        ranks.send(4, "adapter").result(0)


@pytest.fixture
def alone(monkeypatch):
    """Without other ranks."""
    for module in (boards_of, weight_sync):
        monkeypatch.setattr(module, "dist", SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: 1))


@pytest.fixture
def boards(alone):
    """The boards of three ranks, of which the first is rank 0's, on a store in this process."""
    store, made = HashStore(), [Board(1.0) for _ in range(3)]
    for rank, board in enumerate(made):
        board._rank, board._ranks, board.alone, board._store = rank, len(made), False, store
    return made


def test_a_rank_that_is_late_still_reads_every_end(boards):
    """Rank 0 ends many syncs at once if they fail at once, as when an earlier one failed."""
    first, second, third = boards
    for number in range(5):
        first.end(WeightSyncError(f"failed {number}"))
    for board in (second, third):
        for number in range(5):
            method, (outcome,) = board.next_call(0.1)
            board.answer(None)
            assert (method, str(outcome)) == (None, f"failed {number}")
    first.end("report")
    assert second.next_call(0.1)[1] == ("report",)


def test_what_all_ranks_have_read_is_deleted(boards):
    first, *others = boards
    for number in range(20):
        call = first.call("send_weights", (number, "adapter"))
        for board in others:
            board.next_call(0.1)
            board.answer(WeightSyncError("out of luck") if number % 2 else None)
        if number % 2:
            with pytest.raises(WeightSyncError, match="rank 1: out of luck"):
                first.unanswered(call, {})
        else:
            assert first.unanswered(call, {}) == []
        first.end(number)
        for board in others:
            board.next_call(0.1)
            board.answer(None)
    # The last sync's: a call, its end, and two answers to each.
    assert first._store.num_keys() == 6


@pytest.mark.parametrize("closed", [False, True])
def test_a_base_that_was_sent_is_remembered_while_no_transport_is_open(alone, closed):
    settings = config(transport="gloo").model_copy(update={"base_weights": "disk"})
    model = Rank()
    model.version = 3
    weights = WeightSync(model, [Engine(0, 1)], settings)
    assert [weights.sync(kind).kind for kind in ("base", "adapter")] == ["base", "adapter"]
    if closed:
        weights.close()
    successor = Engine(0, 1)
    assert [report.kind for report in weights.readmit([successor])] == ["base", "adapter"]
    assert weights.sync().version == successor.resident == 3
    weights.close()
