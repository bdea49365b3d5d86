# SPDX-License-Identifier: Apache-2.0
"""Receive weights into one engine and make them the ones that are sampled from, or let it refuse to generate."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

from megarl.checkpoint_engine.records import Receipt
from megarl.checkpoint_engine.wire import Kind
from megarl.errors import MegarlError, WeightSyncError
from megarl.sampler.drawing.gate import VersionGate
from megarl.sampler.drawing.readiness import Readiness
from megarl.sampler.drawing.requests import Requests

# vLLM may hold a request's blocks for a moment after its last token; meanwhile its cache cannot be emptied.
RESET_SECONDS = 10.0
# To reach a sender that is to be told of a refusal.
DECLINE_SECONDS = 5.0


class Arrivals:
    """Receives weights into an engine and switches to them. Any failure makes the engine refuse to generate.

    Args:
        requests: the engine's requests and its gate.
        call: function: a worker's method, its arguments -> the answers of all workers.
        reset_cache: function that empties the prefix cache; False while a request holds blocks.
        patience: seconds that a sync waits for requests.
        slots: number of versions that the engine can hold at once.
    """

    def __init__(
        self,
        requests: Requests,
        call: Callable[..., Awaitable[list[Any]]],
        reset_cache: Callable[[], Awaitable[bool]],
        patience: float,
        slots: int,
    ) -> None:
        self._requests, self._call, self._reset_cache, self._patience = requests, call, reset_cache, patience
        self._slots = slots
        # Of the last transfer: set once a flip to it may come, or would fail; and what empties the prefix cache.
        self._begun = asyncio.Event()
        self._begun.set()
        self._emptied: asyncio.Future[None] | None = None
        self._readiness = Readiness(
            lambda: self._gate, lambda *arguments: call("megarl_arm", *arguments), slots, self._leave_slot
        )

    @property
    def _gate(self) -> VersionGate:
        return self._requests.gate

    async def receive(self, endpoint: bytes, first: int, check: Callable[[], None]) -> list[bytes]:
        """See ``VllmSampler.receive``; ``check`` raises if the engine cannot take weights now."""
        begun = self._begun = asyncio.Event()
        with self._refusing_on_error() as gate, _set_at_end(begun):
            announced = json.loads(endpoint)
            version, kind, stays = announced["version"], announced["kind"], announced.get("stays")
            async with self._declining_on_error(endpoint, first):
                check()
                gate.check_usable()
                gate.check_kind(kind)
                if stays and kind == "adapter":
                    await self._readiness.use(announced, first)
                else:
                    self._readiness.forget()
                    kept = await self._make_room(version, kind)
            if stays:
                gate.arm(version, kind, [])
                if kind == "adapter":
                    return []
            calling = ("megarl_receive", endpoint, first, [one + 1 for one in kept])
            answers = await (self._call(*calling) if kind == "adapter" else self._overwrite(begun, *calling))
            receipts = [answer for answer in answers if answer]
            if not stays:
                gate.arm(version, kind, [Receipt.from_bytes(receipt) for receipt in receipts])
            return receipts

    async def _overwrite(self, begun: asyncio.Event, *calling: Any) -> list[Any]:
        """Call the workers, who replace weights, and empty the prefix cache meanwhile; it is full of the old ones'."""
        # The workers first: the sender waits for them. Nothing is computed until the flip, so the cache stays empty.
        receiving = asyncio.ensure_future(self._call(*calling))
        reset = asyncio.ensure_future(self._reset_cache())
        self._emptied = emptied = asyncio.ensure_future(self._empty_prefix_cache(reset, receiving))
        begun.set()
        answers, _ = await asyncio.gather(receiving, emptied)
        return answers

    async def flip(self, version: int, kind: Kind, checksum: str) -> None:
        """See ``VllmSampler.flip``."""
        with self._refusing_on_error():
            # The trainer may hear from the workers that they hold the weights before ``receive`` does.
            await self._begun.wait()
            if kind != "adapter" and self._emptied is not None:
                await self._emptied
            self._gate.check_flip(version, kind, checksum)
            if kind != "adapter":
                self._gate.flip()
                if self._gate.resident is not None:
                    self._requests.resume()
                return
            async with self._requests.drained(self._patience):
                self._gate.flip()
            self._requests.resume()  # after a base, requests wait for the adapter
            await self._requests.move(version, self._patience)
            self._readiness.renew()

    async def readmit(self) -> None:
        """See ``VllmSampler.readmit``."""
        with self._refusing_on_error():
            self._gate.refuse("it is being readmitted")
            await self._requests.end_all(self._patience)
            await self._call("megarl_reset")
        self._requests.gate = self._gate.renewed()
        self._readiness.forget()

    async def _make_room(self, version: int, kind: Kind) -> list[int]:
        """Let nothing use what the weights replace; return the versions whose adapters must stay."""
        if kind == "adapter":
            await self._leave_slot()
            return self._gate.make_room(version, self._slots)
        if self._gate.resident is not None:
            await self._requests.pause(self._patience)
        self._gate.overwrite(kind)
        return []

    async def _leave_slot(self) -> None:
        await self._requests.leave_slot(self._slots, self._patience)

    async def _empty_prefix_cache(self, reset: Awaitable[bool], received: asyncio.Future[Any]) -> None:
        """Drop all cached keys and values, which are those of the weights before; no request runs any more.

        Args:
            reset: a first try, begun when the weights come.
            received: done when they have come. The engine answers nothing else before.

        Raises:
            WeightSyncError: vLLM does not let go of them.
        """
        if await reset:
            return
        await asyncio.wait({received})
        deadline = asyncio.get_running_loop().time() + RESET_SECONDS
        while not await self._reset_cache():
            if asyncio.get_running_loop().time() > deadline:
                raise WeightSyncError("vLLM could not empty its prefix cache for new weights")
            await asyncio.sleep(0.01)

    @asynccontextmanager
    async def _declining_on_error(self, endpoint: bytes, first: int) -> AsyncIterator[None]:
        """Tell the sender if the block fails. It would wait for the workers until its time is over, and be busy."""
        try:
            yield
        except MegarlError as error:
            with suppress(MegarlError, TimeoutError):
                await asyncio.wait_for(self._call("megarl_decline", endpoint, first, str(error)), DECLINE_SECONDS)
            raise

    @contextmanager
    def _refusing_on_error(self) -> Iterator[VersionGate]:
        """Close the gate if anything in the block fails, cancellation included.

        The trainer may hear of a failure first, and readmit the engine before the block ends: then the gate that it
        got is left alone.

        Yields:
            The gate of the block.
        """
        gate = self._gate
        try:
            yield gate
        except BaseException as error:
            gate.refuse(str(error) or repr(error))
            self._requests.resume()  # those that wait are refused
            raise


@contextmanager
def _set_at_end(event: asyncio.Event) -> Iterator[None]:
    """Set an event when the block ends."""
    try:
        yield
    finally:
        event.set()
