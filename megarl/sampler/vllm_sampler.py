# SPDX-License-Identifier: Apache-2.0
"""Run one vLLM engine that answers from one verified policy version: token ids in, token ids and logprobs out.

It needs a process of its own, with ``prepare_environment`` called before this module is imported: vLLM sets the default
process group and the thread count of the process that holds it.

Reproducibility: each prompt has a seed made from ``sampler.seed``, the engine's index, the version and the position in
the version's calls. The same calls therefore give the same completions, except for rounding that depends on the
composition of vLLM's batches, hence on timing.
"""

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import xxhash

from megarl.checkpoint_engine.wire import Kind, Receipt
from megarl.config import EngineConfig
from megarl.errors import ConfigError, DataError, MegarlError, WeightSyncError, WorkerError, nearest
from megarl.families import add_family
from megarl.sampler.environment import resolve_device
from megarl.sampler.gate import VersionGate
from megarl.sampler.settings import LIVE_VERSIONS, engine_arguments, sampling_arguments, stop_tokens
from megarl.sampler.watch import answer_of
from megarl.types import Completion

# vLLM may hold a request's blocks for a moment after its last token; meanwhile its cache cannot be emptied.
RESET_SECONDS = 10.0


class VllmSampler:
    """One engine on vLLM's ``AsyncLLM``. Its methods are ``generate`` and those of ``checkpoint_engine.manager.Sink``.

    Policy version v has LoRA id v + 1 (ids start at 1) and the name ``policy-v<v>``. Names are unique per version,
    because the prefix cache keys on them. With ``checkpoint_engine.content`` merged there is no LoRA: a version is
    written over the last one while nothing is sampled, and the prefix cache is emptied before it is sampled from. Other
    methods may be called while ``generate`` runs.

    Args:
        config: the engine's config; a run's is ``RunConfig.engine``.
        engine_index: index of the engine, 0 .. sampler.engines - 1.
    """

    def __init__(self, config: EngineConfig, *, engine_index: int) -> None:
        add_family(config.model.family)  # it may register the model's type with transformers, which vLLM asks
        self._config = config
        self._index = engine_index
        self._device = resolve_device(config.device)
        self._stop = stop_tokens(config.model.path)
        content = config.checkpoint_engine.content
        self._gate = VersionGate(config.checkpoint_engine.base_weights == "disk", content)
        self._merged = content == "merged"
        self._engine: Any = None
        self._request = 0
        self._calls: dict[int, int] = {}
        self._vocabulary = 0

    @property
    def receivers(self) -> int:
        """Number of vLLM workers of this engine. Each one receives weights."""
        return self._config.sampler.parallel.tensor

    @property
    def version(self) -> int | None:
        """The policy version that may be sampled from; None before the first sync."""
        return self._gate.resident

    async def start(self) -> None:
        """Start the engine.

        Raises:
            ConfigError: ``sampler.engine_args`` names an argument that vLLM does not have.
            WorkerError: vLLM did not start; the cause is chained.
        """
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            given = engine_arguments(self._config, self._index, self._device)
            known = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
            for name in given.keys() - known:
                raise ConfigError(f"sampler.engine_args.{name}: vLLM has no such argument{nearest(name, known)}")
            arguments = AsyncEngineArgs(**given)
            self._engine = AsyncLLM.from_engine_args(arguments)
            self._vocabulary = self._engine.model_config.get_vocab_size()
            await self._rpc("megarl_start", self._merged)
        except MegarlError:
            raise
        except Exception as error:
            raise WorkerError(f"sampler {self._index} did not start: {error}") from error

    async def generate(self, prompts: list[np.ndarray], version: int) -> list[list[Completion]]:
        """Sample from one policy version.

        Args:
            prompts: token ids of each prompt, int64 ``[P]``, 1 <= P <= sampler.max_prompt_tokens.
            version: the policy version that must answer.

        Returns:
            ``sampler.samples_per_prompt`` completions for each prompt.

        Raises:
            StaleVersionError: another version is resident, or none.
            WeightSyncError: a sync failed before or during the call.
            DataError: a prompt is empty, too long, or holds an unknown token.
            WorkerError: the engine died or failed.
        """
        for number, prompt in enumerate(prompts):
            self._check_prompt(number, prompt)
        with self._gate.request(version):
            call = self._calls.get(version, 0)
            self._calls = {version: call + 1}
            tasks = [
                asyncio.ensure_future(self._sample(prompt, version, _seed(self._config, self._index, version, call, i)))
                for i, prompt in enumerate(prompts)
            ]
            try:
                return await self._answer(asyncio.gather(*tasks))
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def receive(self, endpoint: bytes, first: int) -> list[bytes]:
        """Receive one transfer in every worker and stage it.

        Args:
            endpoint: the sender's endpoint as JSON.
            first: receiver index of this engine's first worker.

        Returns:
            Each worker's receipt.

        Raises:
            WeightSyncError: the received weights are not exactly those that were sent, or do not fit the model; or
                older versions still serve requests and leave no slot. The sampler refuses to generate from then on.
            WorkerError: the engine died.
        """
        with self._refusing_on_error():
            self._gate.check_usable()
            announced = json.loads(endpoint)
            self._gate.check_kind(announced["kind"])
            if announced["kind"] != "adapter":
                self._gate.overwrite(announced["kind"])
            else:
                await self._drop_idle(self._gate.resident)
                self._gate.check_room(announced["version"], LIVE_VERSIONS)
            receipts = await self._rpc("megarl_receive", endpoint, first)
            parsed = [Receipt.from_bytes(receipt) for receipt in receipts]
            self._gate.stage(parsed)
            return receipts

    async def flip(self, version: int, kind: Kind, checksum: str) -> None:
        """Switch to the staged weights, after checking that vLLM's kernels read exactly them.

        Raises:
            WeightSyncError: other weights are staged, or vLLM does not hold the staged ones.
            WorkerError: the engine died.
        """
        with self._refusing_on_error():
            self._gate.check_flip(version, kind, checksum)
            if kind != "adapter":
                await self._empty_prefix_cache()
            else:
                await self._call(self._engine.add_lora(_lora_request(version)))
                different = [name for names in await self._rpc("megarl_differences", version + 1) for name in names]
                if different:
                    raise WeightSyncError(
                        f"vLLM does not hold version {version} exactly in: {', '.join(different[:5])}"
                    )
            self._gate.flip()

    async def retire(self, version: int) -> None:
        """Drop every adapter except ``version``'s. Versions that still serve a request are dropped by a later call.

        Raises:
            WorkerError: the engine died.
        """
        with self._refusing_on_error():
            await self._drop_idle(version)

    async def refuse(self, reason: str) -> None:
        """Refuse to generate from now on; running requests fail too. Final for this engine."""
        self._gate.refuse(reason)

    async def resident(self) -> list[tuple[list[int], list[int]]]:
        """Return, for each worker, the LoRA ids that are staged and those that vLLM holds."""
        return await self._rpc("megarl_resident")

    async def close(self) -> None:
        """Stop the engine and its processes. May be called twice."""
        engine, self._engine = self._engine, None
        self._gate.refuse("it was closed")
        if engine is not None:
            engine.shutdown()

    async def _sample(self, prompt: np.ndarray, version: int, seed: int) -> list[Completion]:
        """Return all completions of one prompt."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        arguments = sampling_arguments(self._config, self._stop, seed)
        parameters = SamplingParams(**arguments, output_kind=RequestOutputKind.FINAL_ONLY)
        self._request += 1
        stream = self._alive().generate(
            {"prompt_token_ids": prompt.tolist()},
            parameters,
            request_id=f"{self._index}-{self._request}",
            lora_request=None if self._merged else _lora_request(version),
        )
        try:
            outputs = [output async for output in stream]
        except asyncio.CancelledError:
            raise
        except Exception as error:
            raise WorkerError(f"sampler {self._index} failed while generating: {_cause(error)}") from error
        output = outputs[-1] if outputs else None
        if output is None or not output.finished or len(output.outputs) != self._config.sampler.samples_per_prompt:
            raise WorkerError(f"sampler {self._index} ended a request without all of its completions")
        if list(output.prompt_token_ids) != prompt.tolist():
            raise WorkerError(f"sampler {self._index} answered another prompt than the one it was given")
        return [self._completion(prompt, one, version) for one in output.outputs]

    def _completion(self, prompt: np.ndarray, output: Any, version: int) -> Completion:
        """Convert vLLM's output to a Completion. Raises ``WorkerError`` if anything is incomplete."""
        ids = np.asarray(output.token_ids, dtype=np.int64)
        logprobs = np.asarray(
            [step[token].logprob for step, token in zip(output.logprobs, ids.tolist(), strict=True)], dtype=np.float32
        )
        if output.finish_reason not in ("stop", "length") or not len(ids):
            raise WorkerError(f"sampler {self._index}: a completion ended with {output.finish_reason!r}")
        if not np.isfinite(logprobs).all():
            raise WorkerError(f"sampler {self._index}: a completion has a logprob that is not finite")
        return Completion(
            prompt_ids=np.asarray(prompt, dtype=np.int64),
            response_ids=ids,
            logprobs=logprobs,
            versions=np.full(len(ids), version, dtype=np.int64),
            finish_reason=output.finish_reason,
        )

    def _check_prompt(self, number: int, prompt: np.ndarray) -> None:
        """Refuse prompts that vLLM would truncate, reject or crash on."""
        if prompt.ndim != 1 or prompt.dtype != np.int64:
            raise DataError(f"prompt {number} must be one-dimensional int64, got {prompt.dtype} {prompt.shape}")
        limit = self._config.sampler.max_prompt_tokens
        if not 1 <= len(prompt) <= limit:
            raise DataError(
                f"prompt {number} has {len(prompt)} tokens; allowed are 1 to sampler.max_prompt_tokens {limit}"
            )
        if self._vocabulary and (prompt.min() < 0 or prompt.max() >= self._vocabulary):
            raise DataError(f"prompt {number} holds a token outside the vocabulary of {self._vocabulary}")

    def _alive(self) -> Any:
        """Return the engine; raise ``WorkerError`` if it is not running."""
        if self._engine is None:
            raise WorkerError(f"sampler {self._index} is not started or was closed")
        return self._engine

    async def _drop_idle(self, keep: int | None) -> None:
        """Free the slots of versions that serve no request."""
        for old in self._gate.retirable(keep):
            await self._call(self._alive().remove_lora(old + 1))
            await self._rpc("megarl_drop", old + 1)
            self._gate.retired(old)

    async def _empty_prefix_cache(self) -> None:
        """Drop all cached keys and values, which are those of the weights before."""
        deadline = asyncio.get_running_loop().time() + RESET_SECONDS
        while not await self._call(self._alive().reset_prefix_cache()):
            if asyncio.get_running_loop().time() > deadline:
                raise WeightSyncError("vLLM could not empty its prefix cache after the weights changed")
            await asyncio.sleep(0.01)

    async def _rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the extension in every worker."""
        return await self._call(self._alive().collective_rpc(method, args=args))

    async def _answer(self, awaitable: Any, timeout: float | None = None) -> Any:
        """Await vLLM as long as the engine lives."""
        return await answer_of(awaitable, self._alive(), f"sampler {self._index}", timeout)

    async def _call(self, awaitable: Any) -> Any:
        """Await vLLM. Errors become ``WorkerError`` if the engine is dead, else ``WeightSyncError``."""
        try:
            return await self._answer(awaitable, self._config.checkpoint_engine.timeout_seconds)
        except TimeoutError as error:
            raise WeightSyncError(f"sampler {self._index} did not answer in time") from error
        except Exception as error:
            dead = self._engine is None or self._engine.errored
            raise (WorkerError if dead else WeightSyncError)(_cause(error)) from error

    @contextmanager
    def _refusing_on_error(self) -> Iterator[None]:
        """Close the gate if anything in the block fails, cancellation included."""
        try:
            yield
        except BaseException as error:
            self._gate.refuse(str(error) or repr(error))
            raise


def _lora_request(version: int) -> Any:
    """Return vLLM's handle of a version. The path is never read, but must not be empty."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"policy-v{version}", version + 1, "megarl")


def _seed(config: EngineConfig, engine: int, version: int, call: int, prompt: int) -> int:
    """Return the 31-bit seed of one prompt's samples (vLLM adds the sample's index)."""
    return xxhash.xxh3_64_intdigest(repr((config.sampler.seed, engine, version, call, prompt)).encode()) >> 33


def _cause(error: BaseException) -> str:
    """Return the innermost message; vLLM wraps a failure in several errors and quotes the worker's."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).removeprefix("Call to collective_rpc method failed: ") or repr(error)
