# SPDX-License-Identifier: Apache-2.0
"""Workers wait for the next adapter before it is announced; versions that are still used keep their slots."""

import asyncio
import json
from typing import Any

import pytest

from megarl.errors import WeightSyncError, WorkerError
from megarl.sampler.drawing.gate import VersionGate
from megarl.sampler.drawing.readiness import Readiness


class Engine:
    """A gate, and the calls of its workers."""

    def __init__(self) -> None:
        self.gate, self.calls, self.failure = VersionGate(True), [], None
        self.readiness = Readiness(lambda: self.gate, self.arm, 2, self.leave_slot)
        self.left = asyncio.Event()
        self.left.set()

    async def leave_slot(self) -> None:
        await self.left.wait()

    async def arm(self, endpoint: bytes, first: int, kept: list[int]) -> None:
        self.calls.append((json.loads(endpoint), first, kept))
        if self.failure:
            raise self.failure

    async def sync(self, version: int, sender: int = 1) -> None:
        """Do what a sync of an adapter does to the front end."""
        announced: dict[str, Any] = {"port": sender, "stays": True, "version": version, "kind": "adapter"}
        await self.readiness.use(announced, 2)
        self.gate.arm(version, "adapter", [])
        self.gate.check_flip(version, "adapter", "any")
        self.gate.flip()
        self.readiness.renew()

    async def calls_after(self, *syncs: int) -> list:
        for version in syncs:
            await self.sync(version)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        return self.calls


def test_after_the_first_sync_the_workers_are_ready_before_they_are_needed() -> None:
    sender = {"port": 1, "stays": True}
    assert asyncio.run(Engine().calls_after(5)) == [(sender, 2, []), (sender, 2, [6])]
    # Each further sync only prepares the one after it.
    assert asyncio.run(Engine().calls_after(5, 6, 7))[2:] == [(sender, 2, [7]), (sender, 2, [8])]


def test_another_sender_is_waited_for_anew() -> None:
    async def syncs(engine: Engine) -> list:
        await engine.calls_after(0)
        await engine.sync(1, sender=9)
        return engine.calls

    ports = [call[0]["port"] for call in asyncio.run(syncs(Engine()))]
    assert ports[:3] == [1, 1, 9]


def test_versions_in_use_keep_their_slots() -> None:
    async def syncs(engine: Engine) -> None:
        await engine.calls_after(0)
        with engine.gate.request(0):
            await engine.calls_after(1)
            assert len(engine.calls) == 2, "both slots are in use, so no worker can wait"
            with pytest.raises(WeightSyncError, match="2 would be live version 3"):
                await engine.sync(2)
        await engine.sync(2)
        assert engine.calls[2][2] == [2]

    asyncio.run(syncs(Engine()))


def test_the_workers_wait_as_soon_as_a_slot_is_left() -> None:
    async def syncs(engine: Engine) -> None:
        await engine.calls_after(0)
        engine.left.clear()
        with engine.gate.request(0):
            await engine.calls_after(1)
            assert len(engine.calls) == 2
        syncing = asyncio.ensure_future(engine.sync(2))
        await asyncio.sleep(0.01)
        assert not syncing.done()
        engine.left.set()
        await syncing
        assert engine.calls[2][2] == [2]

    asyncio.run(syncs(Engine()))


def test_a_failure_in_between_is_met_again_by_the_next_sync() -> None:
    async def syncs(engine: Engine) -> None:
        await engine.sync(0)
        engine.failure = WorkerError("the engine died")
        await asyncio.sleep(0)
        with pytest.raises(WorkerError, match="the engine died"):
            await engine.sync(1)

    asyncio.run(syncs(Engine()))
