# SPDX-License-Identifier: Apache-2.0
"""Test what a sender hears of an engine that takes no weights; real transfers are in tests/e2e."""

import asyncio
import json

import pytest

from megarl.checkpoint_engine.records import Receipt
from megarl.errors import WeightSyncError
from megarl.sampler.drawing import arrivals as module
from megarl.sampler.drawing.arrivals import Arrivals
from megarl.sampler.drawing.gate import VersionGate


class Requests:
    """Requests to an engine that an earlier sync failed for."""

    def __init__(self) -> None:
        self.gate = VersionGate(base_ready=True)
        self.gate.refuse("an earlier sync failed")

    def resume(self) -> None:
        pass


@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize("reached", [True, False])
def test_the_sender_of_what_an_engine_does_not_take_is_told_if_it_can_be_reached(monkeypatch, stays, reached):
    monkeypatch.setattr(module, "DECLINE_SECONDS", 0.05)
    endpoint, calls = json.dumps({"version": 3, "kind": "adapter", "stays": stays}).encode(), []

    async def call(*arguments):
        calls.append(arguments)
        if not reached:
            await asyncio.sleep(60)
        return []

    arrivals = Arrivals(Requests(), call, reset_cache=None, patience=1.0, slots=2)
    with pytest.raises(WeightSyncError, match="an earlier sync failed") as raised:
        asyncio.run(arrivals.receive(endpoint, 4, lambda: None))
    assert calls == [("megarl_decline", endpoint, 4, str(raised.value))]


def test_an_engine_that_cannot_take_weights_now_tells_the_sender():
    async def call(*arguments):
        calls.append(arguments)
        return []

    def asleep() -> None:
        raise WeightSyncError("the engine is asleep")

    calls, arrivals = [], Arrivals(Paused(), call, reset_cache=None, patience=1.0, slots=2)
    endpoint = json.dumps({"version": 3, "kind": "merged"}).encode()
    with pytest.raises(WeightSyncError, match="asleep"):
        asyncio.run(arrivals.receive(endpoint, 0, asleep))
    assert calls == [("megarl_decline", endpoint, 0, "the engine is asleep")]


class Paused:
    """Requests of which none runs any more."""

    def __init__(self) -> None:
        self.gate = VersionGate(base_ready=True, content="merged")

    async def pause(self, patience: float) -> None:
        pass

    def resume(self) -> None:
        pass


@pytest.mark.parametrize("answers", [[True], [False, False, True]])
def test_the_prefix_cache_is_emptied_while_weights_arrive_and_again_only_if_it_was_held(monkeypatch, answers):
    """The engine answers one call after the other, so that an answer may come after a transfer of any length."""
    monkeypatch.setattr(module, "RESET_SECONDS", 0.3)
    events = []

    async def call(method, *arguments):
        events.append("receive begins")
        await asyncio.sleep(0.5)
        events.append("receive ends")
        return [Receipt(3, "merged", 0, 1, 8, "sum").to_bytes()]

    async def reset():
        events.append("reset")
        return answers.pop(0)

    many = len(answers)
    requests = Paused()
    arrivals = Arrivals(requests, call, reset, patience=1.0, slots=2)
    asyncio.run(arrivals.receive(json.dumps({"version": 3, "kind": "merged"}).encode(), 0, lambda: None))
    assert events == ["receive begins", "reset", "receive ends", *["reset"] * (many - 1)]
    asyncio.run(arrivals.flip(3, "merged", "sum"))
    assert requests.gate.resident == 3 and events.count("reset") == many


def test_a_prefix_cache_that_stays_held_is_an_error_and_the_engine_refuses(monkeypatch):
    monkeypatch.setattr(module, "RESET_SECONDS", 0.05)

    async def call(method, *arguments):
        return [Receipt(3, "merged", 0, 1, 8, "sum").to_bytes()]

    async def reset():
        return False

    requests = Paused()
    arrivals = Arrivals(requests, call, reset, patience=1.0, slots=2)
    with pytest.raises(WeightSyncError, match="could not empty its prefix cache"):
        asyncio.run(arrivals.receive(json.dumps({"version": 3, "kind": "merged"}).encode(), 0, lambda: None))
    with pytest.raises(WeightSyncError, match="refuses to generate"):
        requests.gate.check_usable()


def test_a_transfer_that_fails_late_leaves_an_engine_alone_that_was_readmitted_meanwhile():
    """A worker tells the trainer of the failure itself, which may readmit the engine before its own call has ended."""
    requests = Paused()
    first = requests.gate

    async def call(method, *arguments):
        requests.gate = first.renewed()
        raise WeightSyncError("damaged")

    async def reset():
        return True

    arrivals = Arrivals(requests, call, reset, patience=1.0, slots=2)
    with pytest.raises(WeightSyncError, match="damaged"):
        asyncio.run(arrivals.receive(json.dumps({"version": 3, "kind": "merged"}).encode(), 0, lambda: None))
    with pytest.raises(WeightSyncError, match="damaged"):
        first.check_usable()
    requests.gate.check_usable()


@pytest.mark.parametrize("kind", ["base", "merged"])
def test_a_flip_may_come_before_the_workers_have_answered_the_engine_but_not_before_its_cache_is_empty(kind):
    """Over a transport that stays connected the trainer hears from the workers first."""

    async def sync() -> list[str]:
        events, told, emptied = [], asyncio.Event(), asyncio.Event()

        async def call(method, *arguments):
            told.set()
            await asyncio.sleep(60)

        async def reset():
            await emptied.wait()
            return True

        requests = Paused()
        arrivals = Arrivals(requests, call, reset, patience=1.0, slots=2)
        endpoint = json.dumps({"version": 3, "kind": kind, "stays": True}).encode()
        receiving = asyncio.ensure_future(arrivals.receive(endpoint, 0, lambda: None))
        # It is called before ``receive`` has begun.
        flipping = asyncio.ensure_future(arrivals.flip(3, kind, "sum"))
        flipping.add_done_callback(lambda _: events.append("flipped"))
        await told.wait()
        await asyncio.sleep(0.01)
        events.append("emptied")
        emptied.set()
        await flipping
        assert not receiving.done() and requests.gate.resident == (3 if kind == "merged" else None)
        receiving.cancel()
        return events

    assert asyncio.run(sync()) == ["emptied", "flipped"]


def test_a_flip_fails_if_its_transfer_did():
    async def sync() -> None:
        async def call(method, *arguments):
            raise WeightSyncError("damaged")

        async def reset():
            await asyncio.sleep(0.05)
            return True

        arrivals = Arrivals(Paused(), call, reset, patience=1.0, slots=2)
        endpoint = json.dumps({"version": 3, "kind": "merged", "stays": True}).encode()
        ended = asyncio.gather(
            arrivals.receive(endpoint, 0, lambda: None), arrivals.flip(3, "merged", "sum"), return_exceptions=True
        )
        for error in await ended:
            assert isinstance(error, WeightSyncError) and "damaged" in str(error)

    asyncio.run(sync())
