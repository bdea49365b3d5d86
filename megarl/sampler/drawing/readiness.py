# SPDX-License-Identifier: Apache-2.0
"""Keep an engine's workers waiting for the next adapter, so that a sync calls no worker while the trainer waits."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

from megarl.errors import MegarlError
from megarl.sampler.drawing.gate import VersionGate


class Readiness:
    """Says whether a thread of every worker waits for an adapter from the sender that will send it.

    A worker begins to wait when it is told which versions are still used; the slot of another is then its own. That is
    done right after a flip, long before the next adapter.

    Args:
        gate: function that returns the engine's gate.
        arm: function: endpoint, receiver index of the first worker, LoRA ids that are used -> ``megarl_arm`` of all
            workers.
        slots: number of versions that the engine can hold at once.
        leave_slot: returns when there is an idle slot, or at once if none is waited for.
    """

    def __init__(
        self,
        gate: Callable[[], VersionGate],
        arm: Callable[[bytes, int, list[int]], Awaitable[Any]],
        slots: int,
        leave_slot: Callable[[], Awaitable[None]],
    ) -> None:
        self._gate, self._arm, self._slots, self._leave_slot = gate, arm, slots, leave_slot
        # Endpoint without version and kind, and the first receiver index: of the last transfer, and of the next.
        self._sender: tuple[dict[str, Any], int] | None = None
        self._ready: tuple[dict[str, Any], int] | None = None
        self._renewal: asyncio.Task | None = None

    async def use(self, endpoint: dict[str, Any], first: int) -> None:
        """Return when the workers wait for the adapter that an endpoint announces. It uses their readiness up.

        Raises:
            WeightSyncError: older versions still serve requests and leave no slot, or a worker cannot reach the sender.
            WorkerError: the engine died.
        """
        if self._renewal is not None:
            await self._renewal
        sender = ({name: value for name, value in endpoint.items() if name not in ("version", "kind")}, first)
        if self._ready != sender:
            await self._leave_slot()
            await self._call(sender, self._gate().make_room(endpoint["version"], self._slots))
        self._sender, self._ready = sender, None

    def renew(self) -> None:
        """Let the workers wait for the next adapter of the same sender, unless every slot is in use."""
        self._renewal = asyncio.ensure_future(self._renew())

    def forget(self) -> None:
        """Wait for no further adapter: the sender is closed, or something else comes first."""
        self._sender = self._ready = None

    async def _renew(self) -> None:
        with contextlib.suppress(MegarlError):  # the next sync meets the same error, and reports it
            await self._leave_slot()
            kept = self._gate().retire_idle()
            if self._sender is not None and len(kept) < self._slots:
                await self._call(self._sender, kept)
                self._ready = self._sender

    async def _call(self, sender: tuple[dict[str, Any], int], kept: list[int]) -> None:
        await self._arm(json.dumps(sender[0]).encode(), sender[1], [version + 1 for version in kept])
