# SPDX-License-Identifier: Apache-2.0
"""Wait for an answer of a vLLM engine, but no longer than the engine lives.

When the engine's process dies, vLLM (0.32) fails running requests but leaves other calls (``add_lora``,
``collective_rpc``) without an answer. A run whose engine died during a weight sync would then wait until that times
out.
"""

import asyncio
from collections.abc import Awaitable
from typing import Any

from megarl.errors import WorkerError

# Seconds between checks that the engine lives.
LOOK_SECONDS = 0.2


async def answer_of(awaitable: Awaitable[Any], engine: Any, name: str, timeout: float | None = None) -> Any:
    """Return or raise the result of ``awaitable``.

    Args:
        awaitable: a call of the engine, or several; cancelled if this function ends without an answer.
        engine: vLLM's ``AsyncLLM``.
        name: name of the engine in messages.
        timeout: seconds, or None for no limit.

    Raises:
        WorkerError: the engine died first.
        TimeoutError: there was no answer in time.
    """
    clock = asyncio.get_running_loop().time
    deadline = float("inf") if timeout is None else clock() + timeout
    task = asyncio.ensure_future(awaitable)
    try:
        while not task.done():
            if engine.errored:
                # Wait once more: vLLM's own error, if it comes, says more.
                await asyncio.wait({task}, timeout=LOOK_SECONDS)
                break
            if clock() >= deadline:
                raise TimeoutError(f"{name} gave no answer within {timeout} s")
            await asyncio.wait({task}, timeout=min(LOOK_SECONDS, deadline - clock()))
        if not task.done():
            raise WorkerError(f"the engine process of {name} died")
        return task.result()
    finally:
        task.cancel()
