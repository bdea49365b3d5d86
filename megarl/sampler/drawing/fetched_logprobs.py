# SPDX-License-Identifier: Apache-2.0
"""Fetch the logprobs that vLLM's worker keeps (``kept_logprobs``), for many ended requests in one call. No vLLM."""

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np

from megarl.errors import WorkerError
from megarl.sampler.drawing.engine_link import call_workers
from megarl.sampler.drawing.watch import answer_of

# Name among ``SamplingParams.extra_args`` under which a request tells the worker its id, and that it is to be kept.
KEY = "megarl_request"
# Seconds between two calls while other requests run. A call comes between two steps of the engine, and costs it time.
SPACING_SECONDS = 0.05
# Seconds between looks whether other requests still run.
LOOK_SECONDS = 0.005

logger = logging.getLogger(__name__)

Source = Literal["worker", "vllm", "none"]
Tokens = tuple[np.ndarray, np.ndarray]


def pack(taken: Iterable[tuple[str, int, np.ndarray, np.ndarray]]) -> bytes:
    """Pack (request, sample, ids int32 ``[T]``, logprobs float32 ``[T]``) into bytes."""
    every = list(taken)
    head = json.dumps([(request, sample, len(ids)) for request, sample, ids, _ in every]).encode()
    arrays = [*(ids for *_, ids, _ in every), *(logprobs for *_, logprobs in every)]
    return b"".join([len(head).to_bytes(8, "little"), head, *(array.tobytes() for array in arrays)])


def unpack(answer: bytes) -> dict[str, dict[int, Tokens]]:
    """Return request -> sample -> (ids int32 ``[T]``, logprobs float32 ``[T]``)."""
    size = int.from_bytes(answer[:8], "little")
    index = json.loads(answer[8 : 8 + size])
    total = sum(count for *_, count in index)
    ids = np.frombuffer(answer, np.int32, total, 8 + size)
    logprobs = np.frombuffer(answer, np.float32, total, 8 + size + ids.nbytes)
    every: dict[str, dict[int, Tokens]] = {}
    begin = 0
    for request, sample, count in index:
        every.setdefault(request, {})[sample] = ids[begin : begin + count], logprobs[begin : begin + count]
        begin += count
    return every


class FetchedLogprobs:
    """Gathers requests that have ended, and fetches their logprobs together.

    Args:
        name: the engine's name, in messages.
        engine: function that returns vLLM's ``AsyncLLM``, or raises ``WorkerError`` if it is not running.
        busy: function that says whether requests run; while none does, waiting for more that end is of no use.

    Attributes:
        source: ``"worker"``; ``"vllm"`` if vLLM itself returns them; ``"none"``, to measure speed: all are 0.
    """

    def __init__(self, name: str, engine: Callable[[], Any], busy: Callable[[], bool]) -> None:
        self._name, self._engine, self._busy = name, engine, busy
        self.source: Source = "vllm"
        self._waiting: dict[str, asyncio.Future] = {}
        self._dropped: list[str] = []
        self._task: asyncio.Task | None = None
        self._called = float("-inf")

    async def start(self) -> None:
        """Let the workers keep the logprobs. If they cannot, say why; vLLM then returns them itself."""
        reason = next(filter(None, await self._call("megarl_keep_logprobs")), None)
        if reason:
            logger.warning("%s: vLLM returns logprobs token by token, which is slower: %s", self._name, reason)
        else:
            self.source = "worker"

    async def _call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of the extension in every worker."""
        engine = self._engine()
        return await answer_of(call_workers(engine, method, arguments), engine, self._name)

    def arguments(self, request: str) -> dict[str, Any]:
        """Return keyword arguments of a request's ``SamplingParams``; vLLM counts the drawn token as no logprob."""
        if self.source == "none":
            return {"logprobs": None}
        return {"logprobs": 0} | ({"extra_args": {KEY: request}} if self.source == "worker" else {})

    async def of(self, request: str, outputs: Sequence[Any]) -> list[np.ndarray]:
        """Return the logprobs of a request that has ended.

        Args:
            request: its id.
            outputs: vLLM's output of each sample.

        Returns:
            For each sample float32 ``[T]``.

        Raises:
            WorkerError: the worker kept other tokens than those, or the engine died.
        """
        if self.source != "worker":
            return [_own_logprobs(one) for one in outputs]
        if not any(one.token_ids for one in outputs):
            self.drop(request)
            return [np.empty(0, np.float32) for _ in outputs]
        answer = self._waiting[request] = asyncio.get_running_loop().create_future()
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._run())
        kept: dict[int, Tokens] = await answer
        return [self._checked(request, sample, one.token_ids, kept.get(sample)) for sample, one in enumerate(outputs)]

    def drop(self, request: str) -> None:
        """Let the worker forget a request, with the next call."""
        if self.source == "worker":
            self._dropped.append(request)

    def _checked(self, request: str, sample: int, ids: Sequence[int], kept: Tokens | None) -> np.ndarray:
        """Return the logprobs, if they belong to these tokens. The worker may have drawn one more, which was unused."""
        kept_ids, logprobs = kept or (np.empty(0, np.int32), np.empty(0, np.float32))
        if not np.array_equal(kept_ids[: len(ids)], ids):
            raise WorkerError(
                f"{self._name}: the worker kept logprobs of other tokens than request {request} returned (sample "
                f"{sample}, {len(ids)} tokens, {len(kept_ids)} kept); sampler.logprobs=vllm does not keep them"
            )
        return logprobs[: len(ids)]

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        while self._waiting:
            while self._busy() and clock() < self._called + SPACING_SECONDS:
                await asyncio.sleep(LOOK_SECONDS)
            waiting, self._waiting = self._waiting, {}
            dropped, self._dropped = self._dropped, []
            self._called = clock()
            try:
                answers = await self._call("megarl_take_logprobs", list(waiting), dropped)
                kept = unpack(next(answer for answer in answers if answer))
            except BaseException as error:
                for future in waiting.values():
                    if not future.done():
                        future.set_exception(WorkerError(f"{self._name}: fetching logprobs failed: {error}"))
                if isinstance(error, asyncio.CancelledError):
                    raise
                continue
            for request, future in waiting.items():
                if not future.done():
                    future.set_result(kept.get(request, {}))


def _own_logprobs(output: Any) -> np.ndarray:
    """Return the logprobs that vLLM gave with an output's tokens, float32 ``[T]``; 0 if it was to give none."""
    if output.logprobs is None:
        return np.zeros(len(output.token_ids), np.float32)
    pairs = zip(output.logprobs, output.token_ids, strict=True)
    return np.asarray([step[token].logprob for step, token in pairs], dtype=np.float32)
