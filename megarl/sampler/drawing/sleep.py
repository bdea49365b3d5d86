# SPDX-License-Identifier: Apache-2.0
"""Let an engine give its GPU memory to the trainer between rollouts, and take it back."""

from collections.abc import Awaitable, Callable
from typing import Any

from megarl.errors import WeightSyncError
from megarl.sampler.drawing.requests import Requests


class Sleep:
    """The sleep of one engine. Weights and adapters are kept on the host; the KV cache is dropped.

    Args:
        requests: the engine's requests and its gate.
        engine: function that returns vLLM's engine.
        answer: function that awaits the engine.
        call: function: a worker's method, its arguments -> the answers of all workers.
    """

    def __init__(
        self,
        requests: Requests,
        engine: Callable[[], Any],
        answer: Callable[[Any], Awaitable[Any]],
        call: Callable[..., Awaitable[list[Any]]],
    ) -> None:
        self._requests, self._engine, self._answer, self._call = requests, engine, answer, call
        self.asleep = False

    def check_awake(self) -> None:
        """Raise ``WeightSyncError`` while the engine sleeps."""
        if self.asleep:
            raise WeightSyncError("the engine sleeps; wake it first")

    async def begin(self) -> int:
        """Fall asleep; return the bytes of GPU memory that became free, over all workers. Nothing if asleep already.

        Raises:
            WeightSyncError: requests are in flight.
        """
        if self.asleep:
            return 0
        if count := self._requests.gate.in_flight:
            raise WeightSyncError(f"{count} requests are in flight; an engine can only sleep without any")
        await self._call("megarl_before_sleep")
        self.asleep = True
        await self._answer(self._engine().sleep(1))
        return sum(await self._call("megarl_after_sleep"))

    async def end(self) -> None:
        """Wake, and compare every tensor with what it was. Nothing if awake.

        Raises:
            WeightSyncError: the GPU has no room, or a tensor changed; the engine refuses to generate then.
        """
        if not self.asleep:
            return
        await self._call("megarl_before_wake")
        await self._answer(self._engine().wake_up())
        try:
            await self._call("megarl_after_wake")
        except BaseException as error:
            self._requests.gate.refuse(str(error) or repr(error))
            raise
        self.asleep = False
