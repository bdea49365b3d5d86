# SPDX-License-Identifier: Apache-2.0
"""Run one vLLM engine that answers from verified policy versions: token ids in, token ids and logprobs out.

It needs a process of its own, with ``prepare_environment`` called before: vLLM sets process group and thread count.

A prompt has the seed it is given, or one made from ``sampler.seed``, the engine's index, the version and the position
in the version's calls. The same calls give the same completions, but for rounding that depends on vLLM's batches.
"""

import asyncio
import os

import numpy as np

from megarl.checkpoint_engine.choice import Receiver, Sender, as_receiver
from megarl.checkpoint_engine.records import Receipt
from megarl.checkpoint_engine.wire import Kind
from megarl.config import EngineConfig
from megarl.config.sections.eval import Sampling
from megarl.errors import MegarlError
from megarl.families import add_family
from megarl.sampler.drawing.arrivals import Arrivals
from megarl.sampler.drawing.batching import Batching
from megarl.sampler.drawing.engine_link import EngineLink
from megarl.sampler.drawing.fetched_logprobs import Source
from megarl.sampler.drawing.gate import VersionGate
from megarl.sampler.drawing.requests import Requests
from megarl.sampler.drawing.sleep import Sleep
from megarl.sampler.engine.build import build_engine, import_vllm, start_error
from megarl.sampler.engine.device_checks import check_loan
from megarl.sampler.engine.settings import live_versions, longest_sequence, stop_tokens
from megarl.sampler.environment import resolve_device
from megarl.sampler.prompt_checks import check_prompt
from megarl.sampler.seeds import seed_from
from megarl.types import Completion


class VllmSampler:
    """One engine on vLLM's ``AsyncLLM``: ``generate``, and the methods of ``checkpoint_engine.participants.Sink``.

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
        self._config, self._index = config, engine_index
        self._device = resolve_device(config.device)
        if self._device == "cuda":
            # The engine's process could not use CUDA if it were forked: this one has asked torch for GPUs.
            os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        content = config.checkpoint_engine.content
        self._link = EngineLink(f"sampler {engine_index}", config.checkpoint_engine.timeout_seconds)
        self._requests = Requests(
            config,
            f"sampler {engine_index}",
            stop_tokens(config.model.path),
            VersionGate(config.checkpoint_engine.base_weights == "disk", content),
            self._link.engine,
        )
        self._arrivals = Arrivals(
            self._requests,
            self._link.rpc,
            lambda: self._link.call(self._link.engine().reset_prefix_cache()),
            # Less than the manager waits for the sync, to say why.
            config.checkpoint_engine.timeout_seconds / 2,
            live_versions(config),
        )
        self._sleep = Sleep(self._requests, self._link.engine, self._link.call, self._link.rpc)
        self.batching = Batching(self._link.engine, config.checkpoint_engine.timeout_seconds)
        self._calls, self._vocabulary = dict[int, int](), 0

    @property
    def receivers(self) -> int:
        """Number of vLLM workers of this engine. Each one receives weights."""
        return self._config.sampler.parallel.tensor

    @property
    def gate(self) -> VersionGate:
        """Says which version may be sampled from."""
        return self._requests.gate

    @property
    def version(self) -> int | None:
        """The policy version that may be sampled from; None before the first sync."""
        return self.gate.resident

    def import_vllm(self) -> None:
        """Import what ``start`` needs, which takes seconds."""
        import_vllm(self._config.model.numerics, self._device)

    async def start(self, loan: bytes = b"") -> None:
        """Start the engine.

        Args:
            loan: ``lend_base`` of the trainer rank on the GPU, whose base is then read; for several GPUs ``joined``.

        Raises:
            ConfigError: ``sampler.engine_args`` names an argument that vLLM does not have; or as ``check_loan``.
            LostError: a signal killed its process.
            WorkerError: vLLM did not start.
        """
        check_loan(self._config, loan)
        try:
            engine = self._link.use(build_engine(self._config, self._index, self._device, loan))
            self._vocabulary = engine.model_config.get_vocab_size()
            await self._link.rpc("megarl_start", self._config.checkpoint_engine.content == "merged")
            if self._config.sampler.logprobs == "worker":
                await self._requests.fetched.start()
        except MegarlError:
            raise
        except Exception as error:
            raise start_error(self._index, error) from error

    async def take_logprobs_from(self, source: Source) -> None:
        """Change the logprobs' source, to compare their speed. No request may run."""
        self._requests.fetched.source = source

    async def generate(
        self,
        prompts: list[np.ndarray],
        version: int,
        seeds: list[int] | None = None,
        sampling: Sampling | None = None,
    ) -> list[list[Completion]]:
        """Sample from one policy version.

        Args:
            prompts: token ids of each prompt, int64 ``[P]``, 1 <= P <= sampler.max_prompt_tokens.
            version: the policy version that must answer.
            seeds: of each prompt, 31 bits.
            sampling: how an evaluation draws; None: as in training.

        Returns:
            ``sampler.samples_per_prompt`` completions for each prompt, or ``sampling.samples``.

        Raises:
            StaleVersionError: another version is resident, or none.
            WeightSyncError: a sync failed before or during the call.
            DataError: a prompt is empty, too long, or holds an unknown token.
            WorkerError: the engine died or failed.
        """
        if seeds is None:
            call = self._calls.get(version, 0)
            self._calls = {version: call + 1}
            seeds = [seed_from(self._config.sampler.seed, self._index, version, call, i) for i in range(len(prompts))]
        return await self._complete(prompts, seeds, version, sampling)

    async def sample(self, prompts: list[np.ndarray], seeds: list[int]) -> list[list[Completion]]:
        """Sample from whichever policy version is current; ``Completion.versions`` says which drew each token.

        A version that becomes current during the call treats the requests as ``checkpoint_engine.in_flight`` says.

        Args:
            prompts: as for ``generate``.
            seeds: seed of each prompt, 31 bits; its sample j is drawn with ``seed + j``.

        Raises:
            StaleVersionError: no version has arrived yet. Others as ``generate``, whose result this returns.
        """
        return await self._complete(prompts, seeds, None)

    async def turn(self, prompt: np.ndarray, seed: int, version: int | None, sampling: Sampling) -> Completion:
        """Draw one turn of an episode; errors as ``generate``.

        Args:
            prompt: all said so far, int64 ``[P]``; fits with the turn into the longest sequence of the config.
            seed, sampling: 31 bits, and how the turn is drawn; ``sampling.samples`` is 1.
            version: the policy version that must answer; None: whichever is current, as for ``sample``.
        """
        room = longest_sequence(self._config) - self._config.sampler.max_prompt_tokens - sampling.max_tokens
        return (await self._complete([prompt], [seed], version, sampling, room=room))[0][0]

    async def score(self, tokens: np.ndarray, version: int) -> np.ndarray:
        """Return the logprobs of a sequence's tokens but the first under a version, at temperature 1.

        Args:
            tokens: int64 ``[T]``, 2 <= T <= sampler.max_prompt_tokens.
            version: the policy version that must answer.

        Returns:
            float32 ``[T - 1]``.

        Raises:
            StaleVersionError, WeightSyncError, WorkerError: as ``generate``.
        """
        self._sleep.check_awake()
        return await self._link.answer(self._requests.score(tokens, version))

    async def _complete(
        self, prompts: list[np.ndarray], seeds: list[int], version: int | None, *how: Sampling | None, room: int = 0
    ) -> list[list[Completion]]:
        self._sleep.check_awake()
        for number, prompt in enumerate(prompts):
            check_prompt(number, prompt, self._config.sampler.max_prompt_tokens, room, self._vocabulary)
        tasks = [
            asyncio.ensure_future(self._requests.complete(prompt, seed, version, *how))
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        try:
            return await self._link.answer(asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def places(self, sender: Sender) -> list[Receiver]:
        """Return where each worker computes, and whether it reads the sender's GPU."""
        return [as_receiver(one) for one in await self._link.rpc("megarl_place", *sender.memory, sender.offer)]

    async def receive(self, endpoint: bytes, first: int) -> list[bytes]:
        """Receive one transfer in every worker and stage it; see ``checkpoint_engine.participants.Sink``.

        Returns:
            Each worker's receipt; none if the transport stays connected and the trainer gets them.

        Raises:
            WeightSyncError: the received weights are not exactly those that were sent, or do not fit the model; or
                older versions still serve requests and leave no slot. The sampler refuses to generate from then on.
            WorkerError: the engine died.
        """
        return await self._arrivals.receive(endpoint, first, self._sleep.check_awake)

    async def flip(self, version: int, kind: Kind, checksum: str) -> None:
        """Switch to the staged weights, which every worker has verified.

        Args:
            version, kind: of the weights.
            checksum: what the receipts of all workers say; the manager has compared them.

        Raises:
            WeightSyncError: other weights are staged.
            WorkerError: the engine died.
        """
        await self._arrivals.flip(version, kind, checksum)

    async def use_base(self, version: int) -> None:
        """Make the base model alone, without an adapter, the version that is sampled from; its number is new."""
        self._requests.base_versions.add(version)
        self.gate.stage([Receipt(version, "adapter", 0, 0, 0, "base")])
        self.gate.check_flip(version, "adapter", "base")
        self.gate.flip()

    async def refuse(self, reason: str) -> None:
        """Refuse to generate from now on; running requests fail too. Final for this engine."""
        self.gate.refuse(reason)
        self._requests.resume()

    async def sleep(self) -> int:
        """Give the GPU memory of weights and KV cache back until ``wake``; see ``sampler.sleep``.

        Returns:
            The bytes that became free, over all workers; 0 if it slept already.

        Raises:
            WeightSyncError: requests are in flight.
            WorkerError: the engine died.
        """
        return await self._sleep.begin()

    async def wake(self) -> None:
        """Take the memory back, and compare weights and adapters, bit by bit, with what they were. May be called twice.

        Raises:
            WeightSyncError: the GPU has no room, or a tensor changed.
            WorkerError: the engine died.
        """
        await self._sleep.end()

    async def readmit(self) -> None:
        """End all requests, with errors, and forget all weights and refusals. Base and policy must come next.

        Raises:
            WeightSyncError: vLLM did not end its requests.
            WorkerError: the engine died.
        """
        await self._arrivals.readmit()

    def is_dead(self) -> bool:
        """Return True if the engine's process has died."""
        return self._link.engine().errored

    async def borrowed(self) -> list[tuple[int, int, list[str]]]:
        """Return, for each worker, what it borrows of the trainer; see ``receiver.weights.borrowed.Summary``."""
        return await self._link.rpc("megarl_borrowed")

    async def resident(self) -> list[tuple[list[int], list[int]]]:
        """Return, for each worker, the LoRA ids that are staged and those that vLLM holds."""
        return await self._link.rpc("megarl_resident")

    async def close(self) -> None:
        """Stop the engine and its processes. May be called twice."""
        self.gate.refuse("it was closed")
        self._link.close()
