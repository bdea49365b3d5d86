# SPDX-License-Identifier: Apache-2.0
"""The order of what rank 0 asks of its own model, what it leaves for the other ranks, and what it remembers."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.checkpoint_engine import board as boards_of
from megarl.checkpoint_engine import weight_sync
from megarl.checkpoint_engine.board import Board
from megarl.checkpoint_engine.transports import hello
from megarl.checkpoint_engine.weight_sync import WeightSync, _AllRanks
from megarl.errors import WeightSyncError
from megarl.futures import wait_or_read
from megarl.network import connect
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
    ranks = _AllRanks(model, SimpleNamespace(alone=True, call=lambda method, *arguments: []), 10.0)
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
    ranks = _AllRanks(model, SimpleNamespace(alone=True, call=lambda method, *arguments: []), 10.0)
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


def boards_of_ranks(monkeypatch, ranks: int, strangers: int = 0) -> list[Board]:
    """Return the boards of ranks that are threads of this process. Strangers connect to rank 0 first."""
    local, told, place, open_ones = threading.local(), threading.Event(), list[Any](), list[Any]()

    def broadcast(values: list[Any], source: int) -> None:
        if local.rank == source:
            place.append(values[0])
            for number in range(strangers):
                open_ones.append(connect(*values[0][:2], 5.0))
                open_ones[-1].sendall(b"x" * 36 * number)  # the first one says nothing
            told.set()
        assert told.wait(10)
        values[0] = place[0]

    def board(rank: int) -> Board:
        local.rank = rank
        return Board(10.0)

    fake = SimpleNamespace(get_rank=lambda: local.rank, get_world_size=lambda: ranks, broadcast_object_list=broadcast)
    monkeypatch.setattr(boards_of, "dist", fake)
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(board, range(ranks)))


@pytest.fixture
def boards(monkeypatch):
    return boards_of_ranks(monkeypatch, 3)


def test_a_rank_that_is_late_still_reads_every_end(boards):
    """Rank 0 ends many syncs at once if they fail at once, as when an earlier one failed."""
    first, second, third = boards
    for number in range(5):
        first.tell(None, WeightSyncError(f"failed {number}"))
    for board in (second, third):
        for number in range(5):
            method, (outcome,) = board.next_call(0.1)
            assert (method, str(outcome)) == (None, f"failed {number}")
    first.tell(None, "report")
    assert second.next_call(0.1)[1] == ("report",)


def test_an_answer_is_that_of_its_call_however_late(boards):
    first, *others = boards
    for number in range(20):
        late = first.call("send_weights", number, "adapter")
        calls = first.call("finish_sync")
        for board in others:
            assert board.next_call(0.1) == ("send_weights", (number, "adapter")) and board.went_on()
            board.answer(WeightSyncError("out of luck") if number % 2 else number)
            assert board.next_call(0.1) == ("finish_sync", ()) and not board.went_on()
            board.answer(None)
        assert [call.result(1.0) for call in calls] == [None, None]
        if number % 2:
            assert [str(call.exception(1.0)) for call in late] == ["out of luck"] * 2
        else:
            assert [call.result(1.0) for call in late] == [number] * 2


def test_an_answer_that_another_thread_reads_is_noticed(boards):
    """Two threads wait for different calls of one rank: each reads whatever comes."""
    first, second, _ = boards
    calls = [first.call("send_weights", number)[0] for number in range(8)]
    with ThreadPoolExecutor(len(calls)) as pool:
        waits = [pool.submit(wait_or_read, [call], 20.0) for call in calls]
        time.sleep(0.2)
        began = time.monotonic()
        for number in range(len(calls)):
            second.next_call(1.0)
            second.answer(number)
        assert not wait(waits, 10.0).not_done and time.monotonic() - began < 10.0
    assert [call.result(0) for call in calls] == list(range(8))


def test_a_rank_that_is_gone_is_noticed_at_once_on_both_sides(boards):
    first, second, third = boards
    calls = first.call("send_weights", 1)
    third.next_call(1.0)
    third.answer("sent")
    second._pipe.close()
    began = time.monotonic()
    assert str(calls[0].exception(30.0)) == "its process is gone" and calls[1].result(1.0) == "sent"
    assert str(first.call("finish_sync")[0].exception(30.0)) == "its process is gone"
    first._lines[1].pipe.close()
    with pytest.raises(WeightSyncError, match="rank 0 does not say how the sync goes on"):
        while third.next_call(30.0):
            pass
    assert time.monotonic() - began < 20.0


def test_whoever_does_not_know_the_token_is_no_rank(monkeypatch):
    monkeypatch.setattr(hello, "HELLO_SECONDS", 0.2)
    first, second = boards_of_ranks(monkeypatch, 2, strangers=3)
    first.tell("begin")
    assert second.next_call(1.0) == ("begin", ())


def test_a_first_message_may_come_in_parts_and_names_a_rank_that_there_is():
    token, found = "t" * hello.TOKEN_BYTES, {}
    with boards_of.listen("127.0.0.1") as listener, ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(boards_of._accepted, listener, token, 1, 10.0)
        port = listener.getsockname()[1]
        with connect("127.0.0.1", port, 5.0) as short:
            short.sendall(token.encode())
        for rank in (0, 2, 1):
            found[rank] = connect("127.0.0.1", port, 5.0)
            found[rank].sendall(token.encode())
            time.sleep(0.1)
            found[rank].sendall(rank.to_bytes(hello.NUMBER_BYTES, "little"))
        [pipe] = accepted.result(10.0)
        pipe.send("to rank 1")
        assert hello.as_pipe(found[1]).recv() == "to rank 1"


def test_a_rank_that_does_not_connect_is_named(monkeypatch):
    with boards_of.listen("127.0.0.1") as listener, pytest.raises(WeightSyncError, match=r"rank 1, 2 did not connect"):
        boards_of._accepted(listener, "token", 2, 0.1)


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
