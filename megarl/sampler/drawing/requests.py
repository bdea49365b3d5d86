# SPDX-License-Identifier: Apache-2.0
"""Ask one vLLM engine for completions, also across a change of the policy version.

``checkpoint_engine.in_flight`` says what becomes of requests that run when another version becomes current. A request
that goes on under the new version is sent again with the tokens drawn so far as a part of its prompt. Its KV is then
computed anew, because vLLM's prefix cache keys on the version's name: no token is drawn from keys and values of an
older policy, and every logprob is exactly that of one version.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np

from megarl.config import EngineConfig
from megarl.config.sections.eval import Sampling
from megarl.errors import StaleVersionError, WeightSyncError, WorkerError
from megarl.sampler.drawing.drawn import ABORTED, Drawn
from megarl.sampler.drawing.engine_link import cause_of
from megarl.sampler.drawing.fetched_logprobs import FetchedLogprobs
from megarl.sampler.drawing.gate import VersionGate
from megarl.sampler.engine.settings import sampling_arguments
from megarl.sampler.seeds import seed_from
from megarl.types import Completion

# Seconds between two looks at requests that are to end, if none ends. One that vLLM did not know yet is aborted then.
LOOK_SECONDS = 0.02
# vLLM's priority of a request that begins before those that wait, whose priority is 0 or their seed.
FIRST = -1


class Requests:
    """The requests to one engine.

    Args:
        config: the engine's config.
        name: the engine's name, in messages and as prefix of request ids.
        stop: ids of the tokens that end a completion.
        gate: says which version may be sampled from.
        engine: function that returns vLLM's ``AsyncLLM``, or raises ``WorkerError`` if it is not running.
    """

    def __init__(
        self,
        config: EngineConfig,
        name: str,
        stop: tuple[int, ...],
        gate: VersionGate,
        engine: Callable[[], Any],
    ) -> None:
        self._config, self._name, self._stop, self.gate, self._engine = config, name, stop, gate, engine
        self._count = 0
        self.base_versions: set[int] = set()  # versions that are the base model alone
        # Requests that a new version ends: id -> version. Requests for one version are not among them.
        self._movable: dict[str, int] = {}
        self._all: set[str] = set()
        self.fetched = FetchedLogprobs(name, engine, lambda: bool(self._all))
        self._admitted, self._one_ended = asyncio.Event(), asyncio.Event()
        self._admitted.set()

    async def complete(
        self, prompt: np.ndarray, seed: int, version: int | None = None, sampling: Sampling | None = None
    ) -> list[Completion]:
        """Draw ``sampler.samples_per_prompt`` completions of one prompt, or as many as ``sampling`` says.

        Args:
            prompt: int64 ``[P]``.
            seed: 31 bits; sample j is drawn with ``seed + j``.
            version: the version that must draw every token, or None for whichever is current when a token is drawn.
            sampling: how an evaluation or an episode draws them; None: as in training.

        Raises:
            StaleVersionError: another version than ``version`` is resident, or none.
            WeightSyncError: a sync failed before or during the call.
            WorkerError: the engine died or failed.
        """
        count = sampling.samples if sampling else self._config.sampler.samples_per_prompt
        every = [Drawn() for _ in range(count)]
        await self._ask(prompt, every, seed, version, sampling)
        await asyncio.gather(*(self._go_on(prompt, one, seed + j, sampling) for j, one in enumerate(every)))
        return [one.completion(prompt, self._name) for one in every]

    async def score(self, tokens: np.ndarray, version: int) -> np.ndarray:
        """Return vLLM's logprobs of all tokens but the first, float32 ``[T - 1]``, at temperature 1; it begins first.

        Raises:
            StaleVersionError, WeightSyncError, WorkerError: as ``complete``.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        kind = RequestOutputKind.FINAL_ONLY
        parameters = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=kind)
        with self._running(version) as (request_id, used):
            sent = {"prompt_token_ids": tokens.tolist()}
            stream = self._engine().generate(
                sent, parameters, request_id=request_id, lora_request=self._adapter(used), priority=FIRST
            )
            output = await self._last(stream)
        logprobs = output.prompt_logprobs if output is not None else None
        if logprobs is None or len(logprobs) != len(tokens):
            raise WorkerError(f"{self._name} returned no logprobs of the canary's tokens")
        pairs = zip(logprobs[1:], tokens[1:].tolist(), strict=True)
        return np.asarray([at[token].logprob for at, token in pairs], dtype=np.float32)

    async def _go_on(self, prompt: np.ndarray, drawn: Drawn, seed: int, sampling: Sampling | None) -> None:
        """Ask again as long as new versions end the request."""
        while drawn.finish_reason == ABORTED:
            if self._config.checkpoint_engine.in_flight == "abort":
                drawn.forget()
            await self._ask(prompt, [drawn], seed, None, sampling)

    async def _ask(
        self, prompt: np.ndarray, every: list[Drawn], seed: int, version: int | None, sampling: Sampling | None = None
    ) -> None:
        """Send one request for all of ``every``, which have drawn the same tokens so far, and add what comes."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        so_far = every[0].ids
        arguments = sampling_arguments(self._config, self._stop, _seed_at(seed, len(so_far)), sampling)
        arguments |= {"n": len(every), "max_tokens": arguments["max_tokens"] - len(so_far)}
        sent = [*prompt.tolist(), *so_far]
        await self._admitted.wait()
        with self._running(version) as (request_id, used), self._dropped_on_error(request_id):
            arguments |= self.fetched.arguments(request_id)
            parameters = SamplingParams(**arguments, output_kind=RequestOutputKind.FINAL_ONLY)
            stream = self._engine().generate(
                {"prompt_token_ids": sent},
                parameters,
                request_id=request_id,
                lora_request=self._adapter(used),
                priority=self._priority(seed),
            )
            output = await self._last(stream)
        if output is None or not output.finished or len(output.outputs) != len(every):
            raise WorkerError(f"{self._name} ended a request without all of its completions")
        if list(output.prompt_token_ids) != sent:
            raise WorkerError(f"{self._name} answered another prompt than the one it was given")
        logprobs = await self.fetched.of(request_id, output.outputs)
        for drawn, one, of_one in zip(every, output.outputs, logprobs, strict=True):
            drawn.add(one, of_one, used)
        if version is not None and any(drawn.finish_reason == ABORTED for drawn in every):
            raise WorkerError(f"{self._name}: a completion ended with {ABORTED!r}")

    @contextlib.contextmanager
    def _dropped_on_error(self, request_id: str) -> Iterator[None]:
        """Let the worker forget a request whose output will not come."""
        try:
            yield
        except BaseException:
            self.fetched.drop(request_id)
            raise

    async def _last(self, stream: AsyncIterator[Any]) -> Any:
        """Return the last output of a stream, or None."""
        try:
            outputs = [output async for output in stream]
        except asyncio.CancelledError:
            raise
        except Exception as error:
            raise WorkerError(f"{self._name} failed while generating: {cause_of(error)}") from error
        return outputs[-1] if outputs else None

    def _priority(self, seed: int) -> int:
        """Return vLLM's priority of a request. A reproducible batch begins in the order of seeds: Ray keeps none."""
        return seed if self._config.sampler.reproducible else 0

    def _adapter(self, version: int) -> Any:
        """Return vLLM's handle of a version's adapter; merged weights and the base model have none."""
        plain = self._config.checkpoint_engine.content == "merged" or version in self.base_versions
        return None if plain else _lora_request(version)

    @contextlib.contextmanager
    def _running(self, version: int | None) -> Iterator[tuple[str, int]]:
        """Keep a request's version resident; yield the request's id and its version."""
        used = self.gate.resident if version is None else version
        if used is None:
            self.gate.check_usable()
            raise StaleVersionError("the sampler holds no policy version yet; sync one first")
        self._count += 1
        request_id = f"{self._name}-{self._count}"
        with self.gate.request(used):
            self._all.add(request_id)
            if version is None:
                self._movable[request_id] = used
            try:
                yield request_id, used
            finally:
                self._movable.pop(request_id, None)
                self._all.discard(request_id)
                self._one_ended.set()

    async def pause(self, timeout: float) -> None:
        """Hold new requests, and wait until none runs: they end by themselves, or are sent again after ``resume``.

        Requests for one version are not waited for.

        Raises:
            WeightSyncError: requests still run after ``timeout`` seconds.
        """
        self._admitted.clear()
        if self._config.checkpoint_engine.in_flight in ("drain", "overlap"):
            await self._wait(lambda: bool(self._movable), timeout, "end")
        else:
            await self._abort(lambda version: True, timeout)

    def resume(self) -> None:
        """Let requests in again."""
        self._admitted.set()

    @contextlib.asynccontextmanager
    async def drained(self, timeout: float) -> AsyncIterator[None]:
        """With ``in_flight: drain``, hold new requests during the block, which begins once none runs.

        Raises:
            WeightSyncError: requests still run after ``timeout`` seconds.
        """
        if self._config.checkpoint_engine.in_flight != "drain":
            yield
            return
        try:
            await self.pause(timeout)
            yield
        finally:
            self.resume()

    async def move(self, version: int, timeout: float) -> None:
        """End the requests that draw from other versions than ``version``, to be sent again under it.

        Not with ``in_flight: drain`` and ``overlap``, where they end by themselves.

        Raises:
            WeightSyncError: vLLM did not end them within ``timeout`` seconds.
        """
        if self._config.checkpoint_engine.in_flight in ("abort", "continue"):
            await self._abort(lambda used: used != version, timeout)

    async def leave_slot(self, slots: int, timeout: float) -> None:
        """With ``in_flight: overlap``, wait until older versions' requests leave an idle slot.

        Args:
            slots: number of versions that the engine can hold at once.
            timeout: seconds.

        Raises:
            WeightSyncError: all slots are in use after ``timeout`` seconds, or the engine refuses.
        """
        if self._config.checkpoint_engine.in_flight == "overlap":
            await self._wait(lambda: self.gate.live >= slots, timeout, "end and leave a slot")

    async def _abort(self, chosen: Callable[[int], bool], timeout: float) -> None:
        """Abort the requests whose versions are chosen, and wait until they have ended."""
        await self._end(lambda: [name for name, used in self._movable.items() if chosen(used)], timeout)

    async def end_all(self, timeout: float) -> None:
        """Abort every request, and wait until all have ended. Whoever asked gets an error if the engine refuses.

        Raises:
            WeightSyncError: vLLM did not end them within ``timeout`` seconds.
        """
        await self._end(lambda: list(self._all), timeout)

    async def _end(self, left: Callable[[], list[str]], timeout: float) -> None:
        while names := left():
            await self._engine().abort(names)
            await self._wait(lambda: bool(left()), LOOK_SECONDS, None)
            timeout -= LOOK_SECONDS
            if timeout <= 0:
                raise WeightSyncError(f"{self._name}: vLLM did not abort {len(names)} requests")

    async def _wait(self, busy: Callable[[], bool], timeout: float, wanted: str | None) -> None:
        """Wait until ``busy()`` is False; after ``timeout`` seconds return, or raise if ``wanted`` says for what."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout
        while busy() and clock() < deadline:
            if wanted:
                self.gate.check_usable()
            self._one_ended.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._one_ended.wait(), min(LOOK_SECONDS, deadline - clock()))
        if busy() and wanted:
            raise WeightSyncError(
                f"{self._name}: {len(self._movable)} requests did not {wanted} within half of "
                "checkpoint_engine.timeout_seconds; checkpoint_engine.in_flight: abort or continue does not wait"
            )


def _lora_request(version: int) -> Any:
    """Return vLLM's handle of a version. The path is never read, but must not be empty."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"policy-v{version}", version + 1, "megarl")


def _seed_at(seed: int, drawn: int) -> int:
    """Return the seed of a request that goes on after ``drawn`` tokens: the first one's would repeat its draws."""
    return seed if not drawn else seed_from(seed, drawn)
