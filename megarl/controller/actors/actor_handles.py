# SPDX-License-Identifier: Apache-2.0
"""Call actors in groups, wait for their results, and report which one failed and why."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from megarl.checkpoint_engine.futures import in_thread
from megarl.checkpoint_engine.wire import Kind
from megarl.config import CheckpointEngineConfig, SamplerConfig, TrainConfig
from megarl.config.sections.eval import Sampling
from megarl.controller.actors.logs import root_of
from megarl.controller.actors.pulse import Watch
from megarl.errors import MegarlError, WorkerError
from megarl.types import Completion, Sample

# Seconds between two checks that all participants are alive.
LOOK_SECONDS = 0.5


class Limit(NamedTuple):
    """A time limit on calls, and the setting that gives it.

    Attributes:
        setting: the setting's name, for messages (``"train.update_seconds"``).
        seconds: the limit, in seconds.
    """

    setting: str
    seconds: float


def wait_all(
    calls: dict[str, Any], watch: Watch | None = None, limit: Limit | None = None, *, alone: bool = False
) -> list[Any]:
    """Return the results of remote calls, in order. Raises as soon as one call fails, without waiting for the others.

    Args:
        calls: participant's name -> object reference of its result.
        watch: tells which participants are alive and where their logs are.
        limit: limit on all calls together, or None.
        alone: True checks only the called participants for signs of life, not all.

    Raises:
        MegarlError: the error that the participant raised, with the path of its log.
        WorkerError: any other exception, a dead process, a participant without signs of life, or an exceeded limit. The
            message names the participant and its log.
    """
    names = {reference: name for name, reference in calls.items()}
    pending = list(names)
    deadline = time.monotonic() + limit.seconds if limit else float("inf")
    while pending:
        ready, pending = ray.wait(pending, timeout=max(0.0, min(LOOK_SECONDS, deadline - time.monotonic())))
        for reference in ready:
            result_of(reference, names[reference], watch)
        if pending and watch:
            watch.check([names[reference] for reference in pending] if alone else None)
        if pending and limit and time.monotonic() >= deadline:
            late = [names[reference] for reference in pending]
            log_note = watch.log_note(late[0]) if watch else ""
            raise WorkerError(
                f"{', '.join(late)} did not answer within {limit.setting} ({limit.seconds:g} s){log_note}"
            )
    return [ray.get(reference) for reference in names]


def result_of(reference: Any, name: str, watch: Watch | None = None) -> Any:
    """Return the result of one remote call. Raises what ``wait_all`` raises."""
    try:
        return ray.get(reference)
    except RayError as error:
        raise named_error(error, name, watch) from None


def named_error(error: RayError, name: str, watch: Watch | None = None) -> MegarlError:
    """Return the error of a remote call as ``wait_all`` raises it."""
    log_note = watch.log_note(name) if watch else ""
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, MegarlError):
            cause.args = (f"{cause}{log_note}",)
            return cause
        root = root_of(str(error)) or f"{type(cause).__name__}: {cause}"
        return WorkerError(f"{name} failed:\n{_traceback_of(error)}\n{root}{log_note}")
    if isinstance(error, RayActorError):
        reason = str(error).strip().splitlines()
        return WorkerError(f"{name} died: {' '.join(reason[:6])}{log_note}")
    return WorkerError(f"{name} failed: {error}{log_note}")


def _traceback_of(error: RayTaskError) -> str:
    """Return the last lines of the remote traceback, enough to find the place of the error."""
    return "\n".join(str(error).strip().splitlines()[-12:])


class TrainerGroup:
    """All trainer ranks as one; also the ``Source`` of a weight sync.

    Args:
        ranks: the trainer actors, by rank.
        watch: tells which participants are alive.
        train: the ``train`` section; only its time limits are used.
    """

    def __init__(self, ranks: Sequence[Any], watch: Watch, train: TrainConfig) -> None:
        self.ranks, self.watch, self._train = list(ranks), watch, train

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method on every rank and wait for all, at most ``train.save_seconds``.

        That limit is for calls that save or load; ``update`` has its own.
        """
        return wait_all(self.start(method, *args), self.watch, Limit("train.save_seconds", self._train.save_seconds))

    def start(self, method: str, *args: Any) -> dict[str, Any]:
        """Call a method on every rank without waiting."""
        shared = [ray.put(argument) for argument in args]  # one copy per node, for any number of ranks
        return {f"trainer rank {i}": getattr(rank, method).remote(*shared) for i, rank in enumerate(self.ranks)}

    def start_on_rank_zero(self, method: str) -> Future:
        """Call a method on rank 0 only; return a future, which raises what ``wait_all`` raises."""
        return as_future({"trainer rank 0": getattr(self.ranks[0], method).remote()}, self.watch, alone=True)

    def update(self, samples: list[Sample], rates: list[float]) -> dict[str, float]:
        """Train on one rollout; return the metrics, which are the same on every rank."""
        limit = Limit("train.update_seconds", self._train.update_seconds)
        return wait_all(self.start("update", samples, rates), self.watch, limit)[0]

    def score(self, tokens: np.ndarray, seconds: float) -> np.ndarray:
        """Return the logprobs of a sequence; see ``TrainerRank.score``."""
        limit = Limit("checkpoint_engine.timeout_seconds", seconds)
        return wait_all(self.start("score", tokens), self.watch, limit)[0]

    def prepare(self, config: CheckpointEngineConfig, receivers: int) -> Future:
        """See ``checkpoint_engine.participants.Source``."""
        return as_future(self.start("prepare_sync", config, receivers), self.watch)

    def send(self, version: int, kind: Kind) -> Future:
        """See ``checkpoint_engine.participants.Source``."""
        return as_future(self.start("send_weights", version, kind), self.watch)

    def finish(self) -> Future:
        """See ``checkpoint_engine.participants.Source``."""
        return as_future(self.start("finish_sync"), self.watch)


def as_future(calls: dict[str, Any], watch: Watch, *, alone: bool = False) -> Future:
    """Return the first participant's result once all have one, as a future; it raises what ``wait_all`` raises."""
    return in_thread(lambda: wait_all(calls, watch, alone=alone)[0])


class EngineHandle:
    """One sampler engine; a ``Sink`` of a weight sync."""

    def __init__(self, actor: Any, name: str, receivers: int, watch: Watch) -> None:
        self.actor, self.name, self.receivers, self.watch = actor, name, receivers, watch

    def memories(self) -> Future:
        """See ``checkpoint_engine.participants.Sink``."""
        return as_future({self.name: self.actor.memories.remote()}, self.watch)

    def receive(self, endpoint: bytes, first: int) -> Future:
        """See ``checkpoint_engine.participants.Sink``."""
        return as_future({self.name: self.actor.receive.remote(endpoint, first)}, self.watch)

    def flip(self, version: int, kind: Kind, checksum: str) -> Future:
        """See ``checkpoint_engine.participants.Sink``."""
        return as_future({self.name: self.actor.flip.remote(version, kind, checksum)}, self.watch)

    def refuse(self, reason: str) -> Future:
        """See ``checkpoint_engine.participants.Sink``."""
        return as_future({self.name: self.actor.refuse.remote(reason)}, self.watch)

    def readmit(self) -> Future:
        """See ``checkpoint_engine.participants.Sink``."""
        return as_future({self.name: self.actor.readmit.remote()}, self.watch)


class SamplerGroup:
    """All engines together as one sampler.

    Args:
        engines: the engine actors, by name.
        watch: tells which participants are alive.
        config: the ``sampler`` section.
    """

    def __init__(self, engines: Mapping[str, Any], watch: Watch, config: SamplerConfig) -> None:
        self.engines = [EngineHandle(actor, name, config.parallel.tensor, watch) for name, actor in engines.items()]
        self.watch, self._limit = watch, Limit("sampler.generate_seconds", config.generate_seconds)

    def generate(
        self,
        prompts: Sequence[np.ndarray],
        version: int,
        seeds: Sequence[int] | None = None,
        sampling: Sampling | None = None,
    ) -> list[list[Completion]]:
        """Spread prompts over the engines; return the completions of each prompt, in the order of the prompts.

        Args:
            prompts: ``[P]`` int64 token ids each.
            version: the policy version that must sample every token.
            seeds, sampling: of an evaluation; see ``VllmSampler.generate``.
        """
        shares = [list(range(i, len(prompts), len(self.engines))) for i in range(len(self.engines))]
        calls = {
            engine.name: engine.actor.generate.remote(
                [prompts[i] for i in share], version, None if seeds is None else [seeds[i] for i in share], sampling
            )
            for engine, share in zip(self.engines, shares, strict=True)
            if share
        }
        results: list[list[Completion]] = [[] for _ in prompts]
        for share, answers in zip(
            [share for share in shares if share], wait_all(calls, self.watch, self._limit), strict=True
        ):
            for index, completions in zip(share, answers, strict=True):
                results[index] = completions
        return results

    def start(self, engine: int, prompt: Any, seed: int) -> Any:
        """Start to sample one prompt under whichever version is current; return the reference of the result.

        Args:
            engine: index of the engine.
            prompt: has the token ids ``[P]`` as ``ids``.
            seed: 31 bits.
        """
        return self.engines[engine].actor.sample.remote(prompt.ids, seed)

    def turn(
        self, prompt: np.ndarray, seed: int, version: int | None, sampling: Sampling, engine: int = 0
    ) -> "Future[Completion]":
        """Start to draw one turn of an episode on an engine; see ``VllmSampler.turn``."""
        handle, future = self.engines[engine % len(self.engines)], Future[Completion]()

        def settle(done: Future) -> None:
            error = done.exception()
            if isinstance(error, RayError):
                error = named_error(error, handle.name, self.watch)
            if error is None:
                future.set_result(done.result())
            else:
                future.set_exception(error)

        handle.actor.turn.remote(prompt, seed, version, sampling).future().add_done_callback(settle)
        return future

    def finished(self, engines: Mapping[Any, int], seconds: float) -> list[tuple[Any, list[Completion]]]:
        """Return the references that are done, with their completions; wait at most ``seconds`` for the first.

        Args:
            engines: reference of a result -> index of the engine.
            seconds: the longest wait, seconds.

        Raises:
            MegarlError: as ``wait_all``; an engine failed or died.
        """
        if not engines:
            return []
        references = list(engines)
        ready, _ = ray.wait(references, num_returns=len(references), timeout=0)
        if not ready:
            ready, _ = ray.wait(references, timeout=seconds)
        names = {reference: self.engines[index].name for reference, index in engines.items()}
        return [(reference, result_of(reference, names[reference], self.watch)) for reference in ready]

    def cancel(self, references: Sequence[Any]) -> None:
        """Cancel requests that nobody waits for any more."""
        for reference in references:
            ray.cancel(reference)

    def score(self, tokens: np.ndarray, version: int) -> dict[str, np.ndarray]:
        """Return each engine's logprobs of a sequence; see ``VllmSampler.score``."""
        calls = {engine.name: engine.actor.score.remote(tokens, version) for engine in self.engines}
        return dict(zip(calls, wait_all(calls, self.watch, self._limit), strict=True))

    def close(self, seconds: float) -> None:
        """Stop all engines. Raises ``WorkerError`` if that takes longer than ``seconds``."""
        calls = {engine.name: engine.actor.close.remote() for engine in self.engines}
        wait_all(calls, self.watch, Limit("the time to stop", seconds), alone=True)
