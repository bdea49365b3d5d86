# SPDX-License-Identifier: Apache-2.0
"""Make an engine begin a batch only when it has all of it, so that two runs decode in the same batches.

The rounding of a sequence's logits depends on what is computed beside it. vLLM begins with the first request that
arrives; which others join it then depends on timing.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from megarl.errors import WorkerError

LOOK_SECONDS = 0.002


class Batching:
    """Holds the scheduler of one engine.

    Args:
        engine: returns vLLM's ``AsyncLLM``.
        seconds: how long ``release`` waits for the requests.
    """

    def __init__(self, engine: Callable[[], Any], seconds: float) -> None:
        self._engine, self._seconds = engine, seconds

    async def hold(self) -> None:
        """Let requests in from now on, but begin none."""
        await self._engine().pause_generation(mode="keep", clear_cache=False)

    async def release(self, sequences: int) -> None:
        """Begin what has arrived, once that is this number of sequences.

        Raises:
            WorkerError: they did not arrive in time. What has arrived begins nevertheless.
        """
        engine = self._engine()
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._seconds
        while (arrived := engine.output_processor.get_num_unfinished_requests()) < sequences and clock() < deadline:
            await asyncio.sleep(LOOK_SECONDS)
        await engine.resume_generation()
        if arrived < sequences:
            raise WorkerError(f"{arrived} of a batch's {sequences} sequences arrived within {self._seconds:g} s")
