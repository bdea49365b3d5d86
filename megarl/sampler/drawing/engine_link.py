# SPDX-License-Identifier: Apache-2.0
"""Call vLLM's engine as long as it lives, with errors that say whose they are."""

from collections.abc import Sequence
from typing import Any

from megarl.errors import WeightSyncError, WorkerError
from megarl.sampler.drawing.watch import answer_of


class EngineLink:
    """The one reference to vLLM's ``AsyncLLM``.

    Args:
        name: the sampler's name, for messages.
        timeout: seconds that ``call`` waits.
    """

    def __init__(self, name: str, timeout: float) -> None:
        self._name, self._timeout = name, timeout
        self._engine: Any = None

    def use(self, engine: Any) -> Any:
        """Take an engine that was started, and return it."""
        self._engine = engine
        return engine

    def close(self) -> None:
        """Stop the engine and its processes. May be called twice."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()

    def engine(self) -> Any:
        """Return the engine; raise ``WorkerError`` if it is not running."""
        if self._engine is None:
            raise WorkerError(f"{self._name} is not started or was closed")
        return self._engine

    async def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the extension in every worker."""
        return await self.call(call_workers(self.engine(), method, args))

    async def answer(self, awaitable: Any, timeout: float | None = None) -> Any:
        """Await vLLM as long as the engine lives."""
        return await answer_of(awaitable, self.engine(), self._name, timeout)

    async def call(self, awaitable: Any) -> Any:
        """Await vLLM. Errors become ``WorkerError`` if the engine is dead, else ``WeightSyncError``."""
        try:
            return await self.answer(awaitable, self._timeout)
        except TimeoutError as error:
            raise WeightSyncError(f"{self._name} did not answer in time") from error
        except Exception as error:
            dead = self._engine is None or self._engine.errored
            raise (WorkerError if dead else WeightSyncError)(cause_of(error)) from error


async def call_workers(engine: Any, method: str, arguments: Sequence[Any]) -> list[Any]:
    """Call a method of the extension in every worker; return the results, by worker.

    Raises:
        WorkerError: a worker failed; with the first one's message.
    """
    answers = await engine.collective_rpc("megarl_call", args=(method, list(arguments)))
    for succeeded, value in answers:
        if not succeeded:
            raise WorkerError(value)
    return [value for _, value in answers]


def cause_of(error: BaseException) -> str:
    """Return the innermost message; vLLM wraps a failure in several errors and quotes the worker's."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).removeprefix("Call to collective_rpc method failed: ") or repr(error)
