# SPDX-License-Identifier: Apache-2.0
"""Run a sampler engine as a Ray actor."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from megarl.config import RunConfig
from megarl.config.sections.eval import Sampling
from megarl.controller.actors.direct import AnswersTogether
from megarl.controller.actors.logs import logs_exceptions, parts_of_start, root_exception, with_cause
from megarl.controller.actors.pulse import Participant
from megarl.errors import LostError, WorkerError
from megarl.types import Completion


@logs_exceptions
class SamplerEngine(AnswersTogether):
    """One vLLM engine in its own process. The actor is asynchronous, so that a sync can arrive at any time.

    Args:
        config: the run's config.
        threads: CPU threads of the engine.
        participant: its name, index and log.
        gpus: names of the engine's GPUs beside those that Ray gave to the actor.
    """

    def __init__(self, config: RunConfig, threads: int, participant: Participant, *gpus: str) -> None:
        self._name, self._log, self._log_begins = participant.name, participant.log, participant.join()
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")  # only the log gets this output
        import ray

        from megarl.sampler import prepare_environment
        from megarl.sampler.engine import fork_server

        prepare_environment(threads)
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join([*map(str, ray.get_gpu_ids()), *gpus])
        # Before this process imports torch: the fork server takes longest.
        fork_server.begin(config.model.numerics, "cuda" if ray.get_gpu_ids() else "cpu")
        from megarl.sampler.vllm_sampler import VllmSampler

        self.sampler = VllmSampler(config.engine, engine_index=participant.index)
        super().__init__(on_gpu=bool(ray.get_gpu_ids()))

    async def start(self, loan: bytes = b"") -> dict[str, float]:
        """Build the engine. Nothing can be sampled before the first sync.

        Args:
            loan: as for ``VllmSampler.start``.

        Returns:
            Seconds of ``imports``, of ``vLLM``'s start, and of those of its parts that its log tells.
        """
        began = time.perf_counter()
        self.sampler.import_vllm()
        imported = time.perf_counter()
        with self._with_cause():
            await self.sampler.start(loan)
        seconds = {"imports": imported - began, "vLLM": time.perf_counter() - imported}
        return seconds | parts_of_start(self._log, self._log_begins)

    async def places(self, sender: Any) -> Any:
        """See ``VllmSampler.places``."""
        return await self.sampler.places(sender)

    async def borrowed(self) -> Any:
        """See ``VllmSampler.borrowed``."""
        return await self.sampler.borrowed()

    async def ping(self) -> None:
        """Raise ``WorkerError`` if vLLM's own process is dead."""
        if self.sampler.is_dead():
            raise WorkerError("its vLLM process died")

    async def sample(
        self, prompt: np.ndarray, seed: int, version: int | None = None, sampling: Sampling | None = None
    ) -> list[Completion]:
        """Sample completions of one prompt from one version, or from whichever is current; see ``VllmSampler``."""
        with self._with_cause():
            if version is None:
                return (await self.sampler.sample([prompt], [seed]))[0]
            return (await self.sampler.generate([prompt], version, [seed], sampling))[0]

    async def turn(self, prompt: np.ndarray, seed: int, version: int | None, sampling: Sampling) -> Completion:
        """Draw one turn of an episode; see ``VllmSampler.turn``."""
        with self._with_cause():
            return await self.sampler.turn(prompt, seed, version, sampling)

    async def score(self, tokens: np.ndarray, version: int) -> np.ndarray:
        """See ``VllmSampler.score``."""
        with self._with_cause():
            return await self.sampler.score(tokens, version)

    async def receive(self, endpoint: bytes, first: int) -> list[bytes]:
        """See ``checkpoint_engine.participants.Sink``."""
        return await self.sampler.receive(endpoint, first)

    async def flip(self, version: int, kind: Any, checksum: str) -> None:
        """See ``checkpoint_engine.participants.Sink``."""
        await self.sampler.flip(version, kind, checksum)

    async def refuse(self, reason: str) -> None:
        """See ``checkpoint_engine.participants.Sink``."""
        await self.sampler.refuse(reason)

    async def hold(self) -> None:
        """See ``Batching``."""
        with self._with_cause():
            await self.sampler.batching.hold()

    async def release(self, sequences: int) -> None:
        """See ``Batching``."""
        with self._with_cause():
            await self.sampler.batching.release(sequences)

    async def sleep(self) -> int:
        """See ``VllmSampler.sleep``."""
        with self._with_cause():
            return await self.sampler.sleep()

    async def wake(self) -> None:
        """See ``VllmSampler.wake``."""
        with self._with_cause():
            await self.sampler.wake()

    async def readmit(self) -> None:
        """See ``checkpoint_engine.participants.Sink``."""
        await self.sampler.readmit()

    async def close(self) -> None:
        """Stop the engine."""
        await self.sampler.close()

    @contextmanager
    def _with_cause(self) -> Iterator[None]:
        """Add the cause to an error, from the log: only vLLM's engine process prints it, not the front end."""
        try:
            yield
        except LostError:
            raise
        except WorkerError as error:
            from megarl.sampler.engine.build import GONE

            cause = root_exception(self._log, self._log_begins)
            if cause is None and GONE.search(str(error)):
                raise LostError.of([self._name], f"{self._name} was killed while it started: {error}") from error
            raise WorkerError(with_cause(str(error), cause)) from error
