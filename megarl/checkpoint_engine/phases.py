# SPDX-License-Identifier: Apache-2.0
"""Run one sync from the trainer to some samplers: prepare, transfer, verify, flip, finish."""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megarl.checkpoint_engine.participants import Sink, Source, gather
from megarl.checkpoint_engine.records import Receipt
from megarl.checkpoint_engine.senders import ask_senders
from megarl.checkpoint_engine.wire import Kind
from megarl.config import CheckpointEngineConfig
from megarl.errors import WeightSyncError


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
        stages: wall seconds of what the phase ``transfer`` consists of: on the trainer (``trainer/export``, ``gather``,
            ``hash``, ``wire``, ``receipts``; of several ranks that send those of the slowest) and on the slowest
            receiver (``receiver/wire``, ``hash``, ``load``, ``check``). The two sides overlap.
    """

    version: int
    kind: Kind
    nbytes: int
    count: int
    checksum: str
    seconds: dict[str, float] = field(default_factory=dict)
    stages: dict[str, float] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """Return ``sync_bytes``, and in ``sync/NAME`` the milliseconds of every phase and stage."""
        times = {f"sync/{name}": 1e3 * seconds for name, seconds in (self.seconds | self.stages).items()}
        return {"sync_bytes": float(self.nbytes), **times}


def run_sync(
    source: Source,
    sinks: Sequence[Sink],
    config: CheckpointEngineConfig,
    version: int,
    kind: Kind,
    endpoint: dict[str, Any] | None,
) -> tuple[SyncReport, dict[str, Any] | None]:
    """Run all phases.

    Args:
        source: the trainer.
        sinks: the samplers; all of them or none switch to the weights.
        config: the ``checkpoint_engine`` section.
        version, kind: of the weights.
        endpoint: of a transport that is still connected to these sinks; None prepares one.

    Returns:
        The report, and the endpoint if the transport stays connected.

    Raises:
        WeightSyncError: a phase failed; the message names the participant, the phase and the cause. The transport is
            not closed, and no sink may be sampled from: some may have switched, and what they hold is unknown.
    """
    deadline = time.monotonic() + config.timeout_seconds
    seconds: dict[str, float] = {}
    receivers = sum(sink.receivers for sink in sinks)
    with _timed("prepare", seconds):
        if endpoint is None:
            prepare = partial(source.prepare, config, receivers, ask_senders(source, sinks, config, deadline))
            endpoint = json.loads(gather({"trainer": prepare}, deadline, "prepare")[0])
        announced = json.dumps(endpoint | {"version": version, "kind": kind}).encode()
    with _timed("transfer", seconds), _receivers_named(sinks):
        calls: dict[str, Callable[[], Future]] = {}
        for sink, first in zip(sinks, _offsets(sink.receivers for sink in sinks), strict=True):
            calls[sink.name] = partial(sink.receive, announced, first)
        calls["trainer"] = partial(source.send, version, kind)
        # Its receivers tell the trainer what they hold, if the transport stays connected. What their engines answer
        # comes later, and says no more.
        *arrived, answer = gather(calls, deadline, "transfer", partial(_has_all_receipts, receivers))
    with _timed("verify", seconds), _receivers_named(sinks):
        sent = Receipt.from_bytes(answer.manifest)
        receipts = [*answer.receipts, *(receipt for part in arrived for receipt in part or ())]
        stages = _verify(sent, version, kind, receipts, receivers)
    with _timed("flip", seconds):
        gather({sink.name: partial(sink.flip, version, kind, sent.checksum) for sink in sinks}, deadline, "flip")
    with _timed("finish", seconds):
        if not endpoint.get("stays"):
            endpoint = None
            gather({"trainer": source.finish}, deadline, "finish")
    return SyncReport(version, kind, sent.nbytes, sent.count, sent.checksum, seconds, stages), endpoint


def _has_all_receipts(receivers: int, found: Mapping[str, Any]) -> bool:
    """Return True if the trainer has answered, among the participants, and with the receipts of all receivers."""
    return "trainer" in found and len(found["trainer"].receipts) == receivers


@contextmanager
def _receivers_named(sinks: Sequence[Sink]) -> Iterator[None]:
    """Say in an error that names a receiver whose it is: the trainer knows only their numbers."""
    try:
        yield
    except WeightSyncError as error:
        owners = [sink.name for sink in sinks for _ in range(sink.receivers)]
        found = re.findall(r"receivers? (\d+(?:, \d+)*)", str(error))
        numbers = sorted({int(number) for one in found for number in one.split(", ")})
        said = "".join(f"; receiver {i} is a worker of {owners[i]}" for i in numbers if i < len(owners))
        message, *log = str(error).split("\nlog of", 1)
        error.args = ("\nlog of".join([message + said, *log]),)
        raise


def _verify(sent: Receipt, version: int, kind: Kind, receipts: Sequence[bytes], receivers: int) -> dict[str, float]:
    """Check that every receiver holds exactly what was sent, and that it is what was asked for; return stages."""
    if (sent.version, sent.kind) != (version, kind):
        raise WeightSyncError(
            f"the trainer sent the {sent.kind} of version {sent.version}, asked for was the {kind} of version {version}"
        )
    parsed = [Receipt.from_bytes(receipt) for receipt in receipts]
    if sorted(receipt.receiver for receipt in parsed) != list(range(receivers)):
        raise WeightSyncError(
            f"receipts came from receivers {[receipt.receiver for receipt in parsed]}, expected were "
            f"{list(range(receivers))}"
        )
    for receipt in parsed:
        receipt.check(sent)
    slowest = {name: max(receipt.seconds.get(name, 0.0) for receipt in parsed) for name in parsed[0].seconds}
    sides = {"trainer": sent.seconds, "receiver": slowest}
    return {f"{side}/{name}": value for side, stages in sides.items() for name, value in stages.items()}


def _offsets(sizes: Iterable[int]) -> Iterator[int]:
    """Yield the running sum of the sizes before each one, from 0."""
    total = 0
    for size in sizes:
        yield total
        total += size


@contextmanager
def _timed(name: str, seconds: dict[str, float]) -> Iterator[None]:
    """Store the wall time of a phase."""
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start
