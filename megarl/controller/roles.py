"""The controller's handles on its actors: groups that fan a call out, and errors that say who failed and why."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from megarl.checkpoint_engine.wire import Kind
from megarl.config import CheckpointEngineConfig
from megarl.errors import MegarlError, WorkerError
from megarl.types import Completion, Sample


def wait_all(calls: dict[str, Any], timeout: float | None = None) -> list[Any]:
    """Results of remote calls, in order; raises as soon as one fails, whatever the others are doing.

    Args:
        calls: participant's name -> object reference.
        timeout: seconds, or None.

    Raises:
        MegarlError: as the participant raised it.
        WorkerError: any other exception, a dead process or a timeout; names the participant.
    """
    names = {reference: name for name, reference in calls.items()}
    pending = list(names)
    while pending:
        ready, pending = ray.wait(pending, timeout=timeout)
        if not ready:
            late = ", ".join(names[reference] for reference in pending)
            raise WorkerError(f"{late} did not answer within {timeout:.0f} s")
        for reference in ready:
            result_of(reference, names[reference])
    return [ray.get(reference) for reference in names]


def result_of(reference: Any, name: str) -> Any:
    """The result of one remote call; errors as in ``wait_all``."""
    try:
        return ray.get(reference)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, MegarlError):
            raise cause from None
        raise WorkerError(f"{name} failed: {type(cause).__name__}: {cause}\n{_traceback_of(error)}") from None
    except RayActorError as error:
        reason = str(error).strip().splitlines()
        raise WorkerError(f"{name} died: {' '.join(reason[:6])}") from None
    except GetTimeoutError as error:
        raise WorkerError(f"{name} did not answer: {error}") from None
    except RayError as error:
        raise WorkerError(f"{name} failed: {error}") from None


def _traceback_of(error: RayTaskError) -> str:
    """The remote traceback's last lines: enough to find the place."""
    return "\n".join(str(error).strip().splitlines()[-12:])


class TrainerGroup:
    """All trainer ranks as one; also the ``Source`` of a weight sync."""

    def __init__(self, ranks: Sequence[Any]) -> None:
        self.ranks = list(ranks)

    def call(self, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
        """Call a method on every rank and wait for all."""
        return wait_all(self.start(method, *args), timeout)

    def start(self, method: str, *args: Any) -> dict[str, Any]:
        """Call a method on every rank without waiting."""
        shared = [ray.put(argument) for argument in args]  # one copy per node, however many ranks
        return {f"trainer rank {i}": getattr(rank, method).remote(*shared) for i, rank in enumerate(self.ranks)}

    def start_on_rank_zero(self, method: str) -> Future:
        """Call a method on rank 0 only; a future, whose errors are as in ``wait_all``."""
        return _later({"trainer rank 0": getattr(self.ranks[0], method).remote()})

    def update(self, samples: list[Sample], rates: list[float]) -> dict[str, float]:
        """Train on one rollout; metrics are the same on every rank."""
        return self.call("update", samples, rates)[0]

    def prepare(self, version: int, kind: Kind, config: CheckpointEngineConfig, receivers: int) -> Future:
        """See ``checkpoint_engine.manager.Source``."""
        return _later(self.start("prepare_sync", version, kind, config, receivers))

    def send(self) -> Future:
        """See ``checkpoint_engine.manager.Source``."""
        return _later(self.start("send_weights"))

    def finish(self) -> Future:
        """See ``checkpoint_engine.manager.Source``."""
        return _later(self.start("finish_sync"))


def _later(calls: dict[str, Any]) -> Future:
    """First participant's result once all have one, as a future; errors as in ``wait_all``."""
    future: Future = Future()

    def finish() -> None:
        try:
            future.set_result(wait_all(calls)[0])
        except BaseException as error:
            future.set_exception(error)

    # A daemon: a participant that never answers must not keep the process alive.
    threading.Thread(target=finish, daemon=True).start()
    return future


class EngineHandle:
    """One sampler engine; a ``Sink`` of a weight sync."""

    def __init__(self, actor: Any, index: int, receivers: int) -> None:
        self.actor, self.name, self.receivers = actor, f"sampler {index}", receivers

    def receive(self, endpoint: bytes, first: int) -> Future:
        """See ``checkpoint_engine.manager.Sink``."""
        return _later({self.name: self.actor.receive.remote(endpoint, first)})

    def flip(self, version: int, kind: Kind, checksum: str) -> Future:
        """See ``checkpoint_engine.manager.Sink``."""
        return _later({self.name: self.actor.flip.remote(version, kind, checksum)})

    def retire(self, version: int) -> Future:
        """See ``checkpoint_engine.manager.Sink``."""
        return _later({self.name: self.actor.retire.remote(version)})

    def refuse(self, reason: str) -> Future:
        """See ``checkpoint_engine.manager.Sink``."""
        return _later({self.name: self.actor.refuse.remote(reason)})


class SamplerGroup:
    """All engines as one sampler."""

    def __init__(self, engines: Sequence[EngineHandle]) -> None:
        self.engines = list(engines)

    def generate(self, prompts: Sequence[np.ndarray], version: int) -> list[list[Completion]]:
        """Spread prompts over the engines; completions per prompt, in the prompts' order.

        Args:
            prompts: ``[P]`` int64 token ids each.
            version: the policy version that must make every token.
        """
        shares = [list(range(i, len(prompts), len(self.engines))) for i in range(len(self.engines))]
        calls = {
            engine.name: engine.actor.generate.remote([prompts[i] for i in share], version)
            for engine, share in zip(self.engines, shares, strict=True)
            if share
        }
        results: list[list[Completion]] = [[] for _ in prompts]
        for share, answers in zip([share for share in shares if share], wait_all(calls), strict=True):
            for index, completions in zip(share, answers, strict=True):
                results[index] = completions
        return results

    def close(self, timeout: float) -> None:
        """Stop all engines."""
        wait_all({engine.name: engine.actor.close.remote() for engine in self.engines}, timeout)
