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
    assert events == ["reset", "receive begins", "receive ends", *["reset"] * (many - 1)]
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
