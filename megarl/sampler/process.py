# SPDX-License-Identifier: Apache-2.0
"""Run a sampler engine in a separate process, driven by the process that started it. No Ray.

The child runs ``megarl.sampler.serve``. The two exchange pickled tuples over a pipe: ``(number, method, arguments)``
there, ``(number, succeeded, result or exception)`` back. Calls overlap, so that a sync can arrive while another version
still decodes.
"""

import itertools
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import nullcontext, suppress
from multiprocessing import connection
from pathlib import Path
from typing import Any, Self

import numpy as np
import psutil

from megarl.checkpoint_engine.choice import Receiver, Sender
from megarl.checkpoint_engine.wire import Kind
from megarl.config import CheckpointEngineConfig, EngineConfig, LoraConfig, ModelConfig, SamplerConfig
from megarl.config.load import parse_section
from megarl.config.sections.eval import Sampling
from megarl.errors import WorkerError
from megarl.hub import local_section
from megarl.sampler.drawing.fetched_logprobs import Source
from megarl.sampler.engine.device_checks import check_device, check_loan
from megarl.sampler.engine.settings import check_sampled
from megarl.sampler.environment import child_variables, resolve_device
from megarl.sampler.serve import STOP
from megarl.types import Completion

# A child that was asked to stop is killed after this many seconds. vLLM gives its own processes 5 to 15.
CLOSE_SECONDS = 30.0


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
        loan: from the ``lend_base`` of the trainer rank on the same GPU, whose base the engine then reads.

    Attributes:
        start_seconds: what the engine took to start; 0 until it has.

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
        self._numbers, self._waiting, self._lock = itertools.count(), dict[int, Future](), threading.Lock()
        # Held while a call is sent, which may take long: `_read` must go on meanwhile, so it never takes this one.
        self._sending = threading.Lock()
        self._connection, theirs = connection.Pipe()
        with open(log, "ab") if log else nullcontext(sys.stderr) as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megarl.sampler.serve", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,  # what the parent prints on its standard output is its own
                stderr=output,
                pass_fds=[theirs.fileno()],
                env=child_variables(gpus),
                start_new_session=True,  # vLLM's processes stay in the child's group, which can be ended as one
            )
        theirs.close()
        self._log = log
        self._ended = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
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
        return self._call("generate", list(prompts), version, *rest)

    def sample(self, prompts: Sequence[np.ndarray], seeds: Sequence[int]) -> Future[list[list[Completion]]]:
        """Start to sample from whichever version is current; see ``VllmSampler.sample``."""
        return self._call("sample", list(prompts), list(seeds))

    def turn(
        self, prompt: np.ndarray, seed: int, version: int | None, sampling: Sampling, home: Any = None
    ) -> Future[Completion]:
        """Start to draw one turn of an episode; see ``VllmSampler.turn``. There is one engine only."""
        return self._call("turn", prompt, seed, version, sampling)

    def score(self, tokens: np.ndarray, version: int) -> np.ndarray:
        """Return the logprobs of a sequence's tokens but the first; see ``VllmSampler.score``."""
        return self._call("score", tokens, version).result()

    def use_base(self, version: int) -> None:
        """Make the base model alone the version to sample from; see ``VllmSampler.use_base``."""
        self._call("use_base", version).result()

    def take_logprobs_from(self, source: Source) -> None:
        """Change the logprobs' source; see ``VllmSampler.take_logprobs_from``."""
        self._call("take_logprobs_from", source).result()

    def borrowed(self) -> list[tuple[int, int, list[str]]]:
        """Return what the engine reads in the trainer's memory; see ``VllmSampler.borrowed``."""
        return self._call("borrowed").result()

    def places(self, sender: Sender) -> Future[list[Receiver]]:
        """See ``VllmSampler.places``."""
        return self._call("places", sender)

    def receive(self, endpoint: bytes, first: int) -> Future[list[bytes]]:
        """See ``checkpoint_engine.participants.Sink``."""
        return self._call("receive", endpoint, first)

    def flip(self, version: int, kind: Kind, checksum: str) -> Future[None]:
        """See ``checkpoint_engine.participants.Sink``."""
        return self._call("flip", version, kind, checksum)

    def refuse(self, reason: str) -> Future[None]:
        """See ``checkpoint_engine.participants.Sink``."""
        return self._call("refuse", reason)

    def sleep(self) -> Future[int]:
        """Give the engine's GPU memory back until ``wake``; see ``VllmSampler.sleep``."""
        return self._call("sleep")

    def wake(self) -> Future[None]:
        """Take the memory back; see ``VllmSampler.wake``."""
        return self._call("wake")

    def readmit(self) -> Future[None]:
        """See ``checkpoint_engine.participants.Sink``."""
        return self._call("readmit")

    def close(self) -> None:
        """Stop the engine and its process; may be called twice."""
        # Said, because closing this end would not reach the child while `_read` waits on it.
        with self._sending, suppress(OSError):
            self._connection.send((0, STOP, ()))
        self._ended.wait(CLOSE_SECONDS)
        self._end_group()
        self._process.wait()
        self._connection.close()

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

        self._started = self._call("start", *arguments)
        self._started.add_done_callback(note)

    def _call(self, method: str, *arguments: Any) -> Future:
        future: Future = Future()
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = future
            ended = self._ended.is_set()  # then nobody settles this call any more
        try:
            if not ended:
                with self._sending:
                    self._connection.send((number, method, arguments))
        except OSError:
            ended = True
        if ended:
            with self._lock:
                self._waiting.pop(number, None)
            _fail(future, self._death())
        return future

    def _read(self) -> None:
        """Give answers to those who wait, until the child or this process closes the pipe."""
        with suppress(EOFError, OSError):
            # The pipe alone would not do: a process that vLLM forks holds the child's end too.
            child, poll = os.pidfd_open(self._process.pid), select.poll()
            poll.register(self._connection, select.POLLIN)
            poll.register(child, select.POLLIN)
            try:
                while self._connection.fileno() in dict(poll.poll()):
                    self._settle(*self._connection.recv())
            finally:
                os.close(child)
        self._ended.set()
        self._end_group()
        with self._lock:
            left, self._waiting = self._waiting, {}
        for future in left.values():
            _fail(future, self._death())

    def _settle(self, number: int, succeeded: bool, value: Any) -> None:
        with self._lock:
            future = self._waiting.pop(number)
        if not succeeded:
            _fail(future, value)
            return
        with suppress(InvalidStateError):  # it was cancelled
            future.set_result(value)

    def _end_group(self) -> None:
        """Kill what is left of the child and of vLLM's processes."""
        if self._process.returncode is not None:
            return  # it has been waited for: the group's number could be another's by now
        for process in psutil.process_iter():
            with suppress(psutil.Error, ProcessLookupError):
                # multiprocessing's tracker removes what the others leave, and ends by itself.
                tracks = "resource_tracker" in " ".join(process.cmdline())
                if os.getpgid(process.pid) == self._process.pid and not tracks:
                    process.kill()

    def _death(self) -> WorkerError:
        status = self._process.wait()  # its pipe closes a little earlier
        log = f"; its log: {self._log}" if self._log else ""
        return WorkerError(f"the process of {self.name} ended with status {status}{log}")


def _fail(future: Future, error: BaseException) -> None:
    with suppress(InvalidStateError):  # it was cancelled, or has failed already
        future.set_exception(error)
