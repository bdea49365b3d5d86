# SPDX-License-Identifier: Apache-2.0
"""Test what a sender hears of an engine that takes no weights; real transfers are in tests/e2e."""

import asyncio
import json

import pytest

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
        asyncio.run(arrivals.receive(endpoint, 4))
    assert calls == [("megarl_decline", endpoint, 4, str(raised.value))]
