# SPDX-License-Identifier: Apache-2.0
"""Run one sync from the trainer to all samplers: prepare, transfer, verify, flip. Fails closed."""

import concurrent.futures
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from megarl.checkpoint_engine.mixin import Sent
from megarl.checkpoint_engine.records import Receipt, check_sync
from megarl.checkpoint_engine.wire import Kind
from megarl.config import CheckpointEngineConfig
from megarl.errors import WeightSyncError

# Seconds for the clean-up after a failure (samplers refuse, the transport closes), which must not delay its report.
CLEANUP_SECONDS = 10.0


class Source(Protocol):
    """The trainer, all ranks together: ``CheckpointEngineMixin`` behind remote calls."""

    def prepare(self, config: CheckpointEngineConfig, receivers: int) -> Future[bytes]:
        """Call ``prepare_sync`` on every rank; return rank 0's endpoint."""
        ...

    def send(self, version: int, kind: Kind) -> Future[Sent]:
        """Call ``send_weights`` on every rank; return rank 0's result."""
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


@dataclass(frozen=True)
class SyncReport:
    """Size and duration of a sync.

    Attributes:
        version: policy version.
        kind: ``"adapter"``, ``"base"`` or ``"merged"``.
        nbytes: bytes of all tensors, counted once (not per receiver).
        count: number of tensors.
        checksum: checksum of the transfer.
        seconds: wall seconds of each phase (``prepare``, ``transfer``, ``verify``, ``flip``, ``finish``).
        stages: wall seconds of what the phase ``transfer`` consists of: on the trainer's rank 0 (``trainer/export``,
            ``gather``, ``hash``, ``wire``, ``receipts``) and on the slowest receiver (``receiver/wire``, ``hash``,
            ``load``, ``check``). The two sides overlap.
    """

    version: int
    kind: Kind
    nbytes: int
    count: int
    checksum: str
    seconds: dict[str, float] = field(default_factory=dict)
    stages: dict[str, float] = field(default_factory=dict)


class CheckpointEngineManager:
    """Drives syncs between one source and all sinks. Used from one thread.

    After the first failure every sink is told to refuse, and ``sync`` refuses too.
    """

    def __init__(self, source: Source, sinks: Sequence[Sink], config: CheckpointEngineConfig) -> None:
        if not sinks:
            raise WeightSyncError("there is no sampler to send weights to")
        self._source, self._sinks, self._config = source, tuple(sinks), config
        self._failure: str | None = None
        # The endpoint of a transport that stays connected, and whether adapters come through it: receivers then wait
        # for nothing else.
        self._endpoint: dict[str, Any] | None = None
        self._adapters = False

    def sync(self, version: int, kind: Kind) -> SyncReport:
        """Send one version's weights to every sampler and switch to them.

        Args:
            version: policy version.
            kind: ``"base"`` once before the first version (unless vLLM read the base from disk) and after the base
                changed; ``checkpoint_engine.content`` then, and after every update.

        Raises:
            WeightSyncError: the sync failed; the message names the participant, the phase and the cause. No sampler
                generates from then on.
        """
        if self._failure:
            raise WeightSyncError(f"an earlier sync failed, so no other is started: {self._failure}")
        check_sync(version, kind)
        seconds: dict[str, float] = {}
        deadline = time.monotonic() + self._config.timeout_seconds
        try:
            sent, stages = self._run(version, kind, deadline, seconds)
        except WeightSyncError as error:
            self._fail(f"{kind} of version {version} was not synced: {error}")
            raise WeightSyncError(str(self._failure)) from error
        except BaseException as error:
            self._fail(f"sync of version {version} was interrupted: {error!r}")
            raise
        return SyncReport(version, kind, sent.nbytes, sent.count, sent.checksum, seconds, stages)

    def refuse(self, reason: str) -> None:
        """Tell every sampler to refuse, after a check outside of the sync failed; ``sync`` refuses from then on."""
        self._fail(reason)

    def _run(
        self, version: int, kind: Kind, deadline: float, seconds: dict[str, float]
    ) -> tuple[Receipt, dict[str, float]]:
        """Run all phases; return what was sent, and the stages. Every failure is a ``WeightSyncError``."""
        receivers = sum(sink.receivers for sink in self._sinks)
        endpoint = None if self._adapters and kind != "adapter" else self._endpoint
        with _phase("prepare", seconds):
            if endpoint is None:
                prepare = partial(self._source.prepare, self._config, receivers)
                endpoint = json.loads(_gather({"trainer": prepare}, deadline, "prepare")[0])
                self._endpoint = endpoint if endpoint.get("stays") else None
            self._adapters = kind == "adapter"
            announced = json.dumps(endpoint | {"version": version, "kind": kind}).encode()
        with _phase("transfer", seconds):
            calls: dict[str, Callable[[], Future]] = {"trainer": partial(self._source.send, version, kind)}
            for sink, first in zip(self._sinks, _offsets(sink.receivers for sink in self._sinks), strict=True):
                calls[sink.name] = partial(sink.receive, announced, first)
            answer, *arrived = _gather(calls, deadline, "transfer")
        with _phase("verify", seconds):
            sent = Receipt.from_bytes(answer.manifest)
            receipts = [*answer.receipts, *(receipt for part in arrived for receipt in part)]
            stages = self._verify(sent, version, kind, receipts)
        with _phase("flip", seconds):
            flips = {sink.name: partial(sink.flip, version, kind, sent.checksum) for sink in self._sinks}
            _gather(flips, deadline, "flip")
        with _phase("finish", seconds):
            if self._endpoint is None:
                _gather({"trainer": self._source.finish}, deadline, "finish")
        return sent, stages

    def _verify(self, sent: Receipt, version: int, kind: Kind, receipts: Sequence[bytes]) -> dict[str, float]:
        """Check that every receiver holds exactly what was sent, and that it is what was asked for; return stages."""
        if (sent.version, sent.kind) != (version, kind):
            raise WeightSyncError(
                f"the trainer sent the {sent.kind} of version {sent.version}, asked for was the {kind} of version "
                f"{version}"
            )
        parsed = [Receipt.from_bytes(receipt) for receipt in receipts]
        expected = list(range(sum(sink.receivers for sink in self._sinks)))
        if sorted(receipt.receiver for receipt in parsed) != expected:
            raise WeightSyncError(
                f"receipts came from receivers {[receipt.receiver for receipt in parsed]}, expected were {expected}"
            )
        for receipt in parsed:
            receipt.check(sent)
        slowest = {name: max(receipt.seconds.get(name, 0.0) for receipt in parsed) for name in parsed[0].seconds}
        sides = {"trainer": sent.seconds, "receiver": slowest}
        return {f"{side}/{name}": value for side, stages in sides.items() for name, value in stages.items()}

    def _fail(self, reason: str) -> None:
        """Store the reason, tell every sampler, close the transport. Best effort, since any of them may be dead."""
        self._failure, self._endpoint = reason, None
        calls: list[Callable[[], Future]] = [partial(sink.refuse, reason) for sink in self._sinks]
        futures = []
        for call in [*calls, self._source.finish]:
            with suppress(Exception):
                futures.append(call())
        concurrent.futures.wait(futures, timeout=CLEANUP_SECONDS)


def _gather(calls: Mapping[str, Callable[[], Future]], deadline: float, phase: str) -> list[Any]:
    """Start all calls, and wait for all of them or for the first failure. Results are in order.

    Raises:
        WeightSyncError: names the first participant that failed, or those that did not answer in time.
    """
    futures: dict[Future, str] = {}
    try:
        for name, call in calls.items():
            futures[call()] = name
    except Exception as error:
        raise WeightSyncError(f"{name}, {phase}: {error}") from error
    done, pending = concurrent.futures.wait(
        futures, timeout=max(0.0, deadline - time.monotonic()), return_when=concurrent.futures.FIRST_EXCEPTION
    )
    for future in futures:
        if future in done and future.exception() is not None:
            raise WeightSyncError(f"{futures[future]}, {phase}: {future.exception()}") from future.exception()
    if pending:
        late = ", ".join(name for future, name in futures.items() if future in pending)
        raise WeightSyncError(f"{late}: {phase} did not end within checkpoint_engine.timeout_seconds")
    return [future.result() for future in futures]


def _offsets(sizes: Iterable[int]) -> Iterator[int]:
    """Yield the running sum of the sizes before each one, from 0."""
    total = 0
    for size in sizes:
        yield total
        total += size


@contextmanager
def _phase(name: str, seconds: dict[str, float]) -> Iterator[None]:
    """Store the wall time of a phase."""
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start
