# SPDX-License-Identifier: Apache-2.0
"""Define the participants of a sync as the manager sees them, one source and sinks, and wait for their answers."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from megarl.checkpoint_engine.choice import Receiver, Sender
from megarl.checkpoint_engine.mixin import Sent
from megarl.checkpoint_engine.wire import Kind
from megarl.config import CheckpointEngineConfig
from megarl.errors import WeightSyncError
from megarl.futures import wait_or_read

# Seconds that the trainer's own error is waited for, once a sampler's has come.
KNOWING_SECONDS = 0.5


class Source(Protocol):
    """The trainer, all ranks together: ``CheckpointEngineMixin`` behind remote calls."""

    def places(self) -> Future[list[Sender]]:
        """Return where each rank computes. Only asked if ``transport`` is ``ipc`` or ``auto``."""
        ...

    def prepare(self, config: CheckpointEngineConfig, receivers: int, senders: Sequence[int]) -> Future[bytes]:
        """Call ``prepare_sync`` on every rank; return ``senders.joined_endpoint``."""
        ...

    def send(self, version: int, kind: Kind) -> Future[Sent]:
        """Call ``send_weights`` on every rank; return ``senders.joined_sent``. It may return when all is sent."""
        ...

    def finish(self) -> Future[Any]:
        """Call ``finish_sync`` on every rank."""
        ...


class Sink(Protocol):
    """One sampler engine: ``VllmSampler`` behind remote calls.

    Attributes:
        name: name in messages (``"sampler 0"``).
        receivers: number of vLLM workers in this engine (``sampler.parallel.tensor``). Each one receives.
    """

    name: str
    receivers: int

    def places(self, sender: Sender) -> Future[list[Receiver]]:
        """Return where each worker computes. Only asked if the source is."""
        ...

    def receive(self, endpoint: bytes, first: int) -> Future[list[bytes]]:
        """Receive and stage in every worker, with receiver indices from ``first`` on.

        Returns:
            The workers' receipts; none if they send them to the trainer themselves.
        """
        ...

    def flip(self, version: int, kind: Kind, checksum: str) -> Future[Any]:
        """Switch to the staged weights, which must have this checksum."""
        ...

    def refuse(self, reason: str) -> Future[Any]:
        """Refuse to generate from now on."""
        ...

    def readmit(self) -> Future[Any]:
        """End all requests, and forget all weights and the refusal. Nothing is sampled until base and policy came."""
        ...


def gather(
    calls: Mapping[str, Callable[[], Future]],
    deadline: float,
    phase: str,
    enough: Callable[[Mapping[str, Any]], bool] | None = None,
) -> list[Any]:
    """Start all calls, and wait for all of them or for the first failure.

    Args:
        calls: by the participant's name.
        deadline: when to give up, by ``time.monotonic``.
        phase: for messages.
        enough: returns True if the results so far, by name, make the others superfluous.

    Returns:
        The results, in order; None for one that was not waited for.

    Raises:
        WeightSyncError: names the first participant that failed, or those that did not answer in time.
    """
    futures: dict[Future, str] = {}
    try:
        for name, call in calls.items():
            if any(map(_failed, futures)):
                break  # a dead engine's call fails at once; what would wait for it need not begin
            futures[call()] = name
    except Exception as error:
        raise WeightSyncError(f"{name}, {phase}: {error}") from error

    def has_enough() -> bool:
        return enough is not None and enough({name: one.result() for one, name in futures.items() if _succeeded(one)})

    done, pending = {one for one in futures if one.done()}, set[Future]()
    if len(done) < len(futures) and not has_enough():
        done, pending = wait_or_read(futures, max(0.0, deadline - time.monotonic()), has_enough)
    # The trainer knows more than "the sender is gone", which may be heard before its own error.
    if any(map(_failed, done)):
        trainer = [one for one in pending if futures[one] == "trainer"]
        wait_or_read(trainer, min(KNOWING_SECONDS, max(0.0, deadline - time.monotonic())))
    for future in sorted(futures, key=lambda one: futures[one] != "trainer"):
        if _failed(future):
            raise WeightSyncError(f"{futures[future]}, {phase}: {future.exception()}") from future.exception()
    if pending and not has_enough():
        late = ", ".join(name for future, name in futures.items() if future in pending)
        raise WeightSyncError(f"{late}: {phase} did not end within checkpoint_engine.timeout_seconds")
    return [future.result() if _succeeded(future) else None for future in futures]


def _succeeded(future: Future) -> bool:
    """Return True if a future is done, and has a result."""
    return future.done() and not future.cancelled() and future.exception() is None


def _failed(future: Future) -> bool:
    """Return True if a future is done, and has an error."""
    return future.done() and not future.cancelled() and future.exception() is not None
