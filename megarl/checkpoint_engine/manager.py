# SPDX-License-Identifier: Apache-2.0
"""Bring versions from the trainer to all samplers, and bring back samplers that failed. Fails closed."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from megarl.checkpoint_engine.participants import Sink, Source, gather
from megarl.checkpoint_engine.phases import SyncReport, run_sync
from megarl.checkpoint_engine.records import check_sync
from megarl.checkpoint_engine.wire import Kind
from megarl.config import CheckpointEngineConfig
from megarl.errors import WeightSyncError
from megarl.futures import wait_or_read

# Seconds for the clean-up after a failure (samplers refuse, the transport closes), which must not delay its report.
CLEANUP_SECONDS = 10.0


class CheckpointEngineManager:
    """Drives syncs between one source and all sinks. Used from one thread.

    A sink is healthy, or stale: it refuses to generate, since a sync or a check of it failed and what it holds is
    unknown. As long as one is stale, ``sync`` refuses. ``readmit`` brings it back. One whose process is dead needs a
    successor first (``replace``); until then it is stale, or the others go on without it (``lose``).
    """

    def __init__(self, source: Source, sinks: Sequence[Sink], config: CheckpointEngineConfig) -> None:
        if not sinks:
            raise WeightSyncError("there is no sampler to send weights to")
        self._source, self._config = source, config
        self._sinks = {sink.name: sink for sink in sinks}
        if len(self._sinks) < len(sinks):
            names = ", ".join(sink.name for sink in sinks)
            raise WeightSyncError(
                f"the samplers are named {names}; each needs a name of its own (SamplerProcess: index)"
            )
        # Name of each stale sink -> why it is; the same of those that are gone.
        self._stale: dict[str, str] = {}
        self._gone: dict[str, str] = {}
        # The endpoint of a transport that stays connected, the sinks that it is connected to, and whether adapters come
        # through it: receivers then wait for nothing else.
        self._endpoint: dict[str, Any] | None = None
        self._connected: tuple[str, ...] = ()
        self._adapters = False
        # False as long as every sink has the base that it read from disk.
        self._sends_base = config.base_weights == "send" or config.content == "merged"

    @property
    def stale(self) -> dict[str, str]:
        """Map the names of the stale sinks to the reasons."""
        return dict(self._stale)

    @property
    def present(self) -> list[str]:
        """Return the names of the sinks that take part in syncs: all but those that ``lose`` left out."""
        return [name for name in self._sinks if name not in self._gone]

    def sync(self, version: int, kind: Kind) -> SyncReport:
        """Send one version's weights to every sampler and switch to them.

        Args:
            version: policy version.
            kind: ``"base"`` once before the first version (unless vLLM read the base from disk) and after the base
                changed; ``checkpoint_engine.content`` then, and after every update.

        Raises:
            WeightSyncError: the sync failed; the message names the participant, the phase and the cause. Every sampler
                that is present is stale from then on.
        """
        if self._stale:
            name, reason = next(iter(self._stale.items()))
            raise WeightSyncError(f"an earlier sync failed, and {name} was not readmitted since: {reason}")
        if not self.present:
            raise WeightSyncError(f"no sampler is left: {'; '.join(self._gone.values())}")
        return self._sync([self._sinks[name] for name in self.present], version, kind)

    def readmit(self, version: int, check: Callable[[list[str]], Any] = lambda names: None) -> list[SyncReport]:
        """Bring the stale sinks back: they forget everything, and get the base and a version.

        The base is left out if they read it from disk, as their successors do, and none was ever sent. The others may
        go on meanwhile; what they hold is not touched.

        Args:
            version: the trainer's version.
            check: called with their names once they have switched; raises if they must not be sampled from.

        Returns:
            The reports of the syncs; none if no sink is stale.

        Raises:
            WeightSyncError: it failed, and they are still stale.
        """
        sinks = [self._sinks[name] for name in self._stale]
        if not sinks:
            return []
        calls = {sink.name: sink.readmit for sink in sinks}
        gather(calls, time.monotonic() + self._config.timeout_seconds, "readmit")
        kinds: list[Kind] = ["base", self._config.content] if self._sends_base else [self._config.content]
        reports = [self._sync(sinks, version, kind) for kind in kinds]
        try:
            check([sink.name for sink in sinks])
        except BaseException as error:
            self._refuse(sinks, str(error) or repr(error))
            raise
        self._stale = {}
        return reports

    def replace(self, sink: Sink, reason: str) -> None:
        """Put a new engine in the place of one of its name, whose process is dead. It is stale.

        Args:
            sink: the new engine.
            reason: why the old one is gone.
        """
        if sink.name not in self._sinks:
            raise WeightSyncError(f"no sampler is named '{sink.name}'; there are {', '.join(self._sinks)}")
        self._gone.pop(sink.name, None)
        self._sinks[sink.name], self._stale[sink.name] = sink, reason
        self._endpoint = None  # what is connected is the dead one

    def use(self, config: CheckpointEngineConfig) -> None:
        """Sync as another ``checkpoint_engine`` section says from now on."""
        if config != self._config:
            self._config, self._endpoint = config, None

    def disconnect(self) -> None:
        """Let the next sync connect anew, since the source has closed the transport."""
        self._endpoint = None

    def lose(self, name: str, reason: str) -> None:
        """Go on without a sampler whose process is dead, until ``replace`` brings its successor."""
        self._gone[name] = reason
        self._stale.pop(name, None)

    def refuse(self, reason: str) -> None:
        """Make every sampler stale, after a check outside of the sync failed."""
        self._refuse([self._sinks[name] for name in self.present], reason)

    def _sync(self, sinks: list[Sink], version: int, kind: Kind) -> SyncReport:
        """Sync to some sinks; they are stale if it fails."""
        check_sync(version, kind)
        self._sends_base |= kind == "base"
        names = tuple(sink.name for sink in sinks)
        usable = self._connected == names and (kind == "adapter" or not self._adapters)
        endpoint, self._connected, self._adapters = self._endpoint if usable else None, names, kind == "adapter"
        try:
            report, self._endpoint = run_sync(self._source, sinks, self._config, version, kind, endpoint)
            return report
        except WeightSyncError as error:
            reason = f"{kind} of version {version} was not synced: {error}"
            self._refuse(sinks, reason)
            raise WeightSyncError(reason) from error
        except BaseException as error:
            self._refuse(sinks, f"sync of version {version} was interrupted: {error!r}")
            raise

    def _refuse(self, sinks: Sequence[Sink], reason: str) -> None:
        """Tell sinks to refuse, and close the transport. Best effort, since any of them may be dead."""
        self._endpoint = None
        self._stale |= {sink.name: reason for sink in sinks}
        calls: list[Callable[[], Future]] = [partial(sink.refuse, reason) for sink in sinks]
        futures = []
        for call in [*calls, self._source.finish]:
            with suppress(Exception):
                futures.append(call())
        pending, until = set(futures), time.monotonic() + CLEANUP_SECONDS
        while pending and time.monotonic() < until:
            _, pending = wait_or_read(pending, until - time.monotonic())
