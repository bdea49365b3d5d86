# SPDX-License-Identifier: Apache-2.0
"""Run a sampler engine in a separate process, driven by the process that started it. No Ray."""

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

import numpy as np

from megarl.checkpoint_engine.choice import Receiver, Sender
from megarl.checkpoint_engine.wire import Kind
from megarl.config import CheckpointEngineConfig, EngineConfig, LoraConfig, ModelConfig, SamplerConfig
from megarl.config.load import parse_section
from megarl.config.sections.eval import Sampling
from megarl.hub import local_section
from megarl.sampler.child import Child
from megarl.sampler.drawing.fetched_logprobs import Source
from megarl.sampler.engine.device_checks import check_device, check_loan
from megarl.sampler.engine.settings import check_sampled
from megarl.sampler.environment import child_variables, resolve_device
from megarl.types import Completion


class SamplerProcess:
    """One vLLM engine in a child process; a ``checkpoint_engine.participants.Sink`` that also generates.

    Use it as a context manager, or call ``close``: the child ends with its parent in any case.

    Args:
        model: a Hugging Face folder, the id of a model on the hub, or the ``model`` section.
        lora: the ``lora`` section, as the trainer's.
        sampler: the ``sampler`` section; ``engines`` does not count, this is one.
        checkpoint_engine: the ``checkpoint_engine`` section, as the one given to ``WeightSync``.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        gpus: indices, among the GPUs that this process sees, of those that the engine gets; default: all.
        threads: CPU threads of the engine; default: all cores that this process may use.
        log: file that takes what the child prints; default: this process's standard error.
        index: number of this engine among several; shifts its seeds.
        longest_response: most tokens of any completion; default: ``sampler.max_response_tokens``.
        loan: ``lend_base`` of the trainer rank on the GPU, whose base is then read; for several GPUs ``joined``.

    Attributes:
        start_seconds: what the engine took to start; 0 until it has.
        process: the child.

    Raises:
        ConfigError, UnsupportedError: what the sampler cannot do is refused before the child is started.
    """

    def __init__(
        self,
        model: str | Path | ModelConfig | Mapping[str, Any],
        *,
        lora: LoraConfig | Mapping[str, Any] | None = None,
        sampler: SamplerConfig | Mapping[str, Any] | None = None,
        checkpoint_engine: CheckpointEngineConfig | Mapping[str, Any] | None = None,
        device: Any = "auto",
        gpus: Sequence[int] | None = None,
        threads: int | None = None,
        log: str | Path | None = None,
        index: int = 0,
        longest_response: int | None = None,
        loan: bytes = b"",
    ) -> None:
        self.config = EngineConfig(
            model=local_section(model),
            lora=parse_section(LoraConfig, "lora", lora),
            sampler=parse_section(SamplerConfig, "sampler", sampler),
            checkpoint_engine=parse_section(CheckpointEngineConfig, "checkpoint_engine", checkpoint_engine),
            device=device,
            longest_response=longest_response,
        )
        check_sampled(self.config)
        check_device(self.config, resolve_device(device))
        check_loan(self.config, loan)
        self.name, self.receivers = f"sampler {index}", self.config.sampler.parallel.tensor
        self._child = Child(self.name, child_variables(gpus), log)
        self.process = self._child.process
        self._start(self.config, threads, index, loan)

    def wait(self) -> Self:
        """Wait until the engine has started; every other call does so by itself.

        Raises:
            WorkerError: it did not start.
        """
        self._started.result()
        self._timed.wait()
        return self

    def generate(
        self,
        prompts: Sequence[np.ndarray],
        version: int,
        seeds: Sequence[int] | None = None,
        sampling: Sampling | None = None,
    ) -> list[list[Completion]]:
        """Sample from one policy version; see ``VllmSampler.generate``."""
        given = None if seeds is None else list(seeds)
        return self.start_generate(prompts, version, given, sampling).result()

    def start_generate(self, prompts: Sequence[np.ndarray], version: int, *rest: Any) -> Future[list[list[Completion]]]:
        """Start to sample from one policy version; ``rest`` as for ``generate``."""
        return self._child.call("generate", list(prompts), version, *rest)

    def sample(self, prompts: Sequence[np.ndarray], seeds: Sequence[int]) -> Future[list[list[Completion]]]:
        """Start to sample from whichever version is current; see ``VllmSampler.sample``."""
        return self._child.call("sample", list(prompts), list(seeds))

    def turn(
        self, prompt: np.ndarray, seed: int, version: int | None, sampling: Sampling, home: Any = None
    ) -> Future[Completion]:
        """Start to draw one turn of an episode; see ``VllmSampler.turn``. There is one engine only."""
        return self._child.call("turn", prompt, seed, version, sampling)

    def score(self, tokens: np.ndarray, version: int) -> np.ndarray:
        """Return the logprobs of a sequence's tokens but the first; see ``VllmSampler.score``."""
        return self._child.call("score", tokens, version).result()

    def use_base(self, version: int) -> None:
        """Make the base model alone the version to sample from; see ``VllmSampler.use_base``."""
        self._child.call("use_base", version).result()

    def take_logprobs_from(self, source: Source) -> None:
        """Change the logprobs' source; see ``VllmSampler.take_logprobs_from``."""
        self._child.call("take_logprobs_from", source).result()

    def borrowed(self) -> list[tuple[int, int, list[str]]]:
        """Return what the engine reads in the trainer's memory; see ``VllmSampler.borrowed``."""
        return self._child.call("borrowed").result()

    def places(self, sender: Sender) -> Future[list[Receiver]]:
        """See ``VllmSampler.places``."""
        return self._child.call("places", sender)

    def receive(self, endpoint: bytes, first: int) -> Future[list[bytes]]:
        """See ``checkpoint_engine.participants.Sink``."""
        return self._child.direct.call("receive", endpoint, first)

    def flip(self, version: int, kind: Kind, checksum: str) -> Future[None]:
        """See ``checkpoint_engine.participants.Sink``."""
        return self._child.direct.call("flip", version, kind, checksum)

    def refuse(self, reason: str) -> Future[None]:
        """See ``checkpoint_engine.participants.Sink``."""
        return self._child.call("refuse", reason)

    def sleep(self) -> Future[int]:
        """Give the engine's GPU memory back until ``wake``; see ``VllmSampler.sleep``."""
        return self._child.call("sleep")

    def wake(self) -> Future[None]:
        """Take the memory back; see ``VllmSampler.wake``."""
        return self._child.call("wake")

    def readmit(self) -> Future[None]:
        """See ``checkpoint_engine.participants.Sink``."""
        return self._child.call("readmit")

    def close(self) -> None:
        """Stop the engine and its process; may be called twice."""
        self._child.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self, *arguments: Any) -> None:
        began, self.start_seconds = time.perf_counter(), 0.0
        # Whoever waits for a future may go on before what is called at its end.
        self._timed = threading.Event()

        def note(started: Future) -> None:
            self.start_seconds = time.perf_counter() - began
            self._timed.set()

        self._started = self._child.call("start", *arguments)
        self._started.add_done_callback(note)
