# SPDX-License-Identifier: Apache-2.0
"""Wait for what a vLLM engine answers, but no longer than the engine lives.

When its process dies, vLLM (0.32) fails the requests that are running, but leaves other calls (``add_lora``,
``collective_rpc``) without an answer: a run whose engine died in a weight sync would stand still until that times out.
"""

import asyncio
from collections.abc import Awaitable
from typing import Any

from megarl.errors import WorkerError

# Between two looks at whether the engine is still there.
LOOK_SECONDS = 0.2


async def answer_of(awaitable: Awaitable[Any], engine: Any, name: str, timeout: float | None = None) -> Any:
    """What ``awaitable`` returns or raises.

    Args:
        awaitable: a call of the engine, or several; cancelled if it ends without an answer.
        engine: vLLM's ``AsyncLLM``.
        name: of the engine, for messages.
        timeout: seconds, or None.

    Raises:
        WorkerError: the engine died first.
        TimeoutError: no answer in time.
    """
    clock = asyncio.get_running_loop().time
    deadline = float("inf") if timeout is None else clock() + timeout
    task = asyncio.ensure_future(awaitable)
    try:
        while not task.done():
            if engine.errored:
                # vLLM's own error says more, where there is one.
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
