# SPDX-License-Identifier: Apache-2.0
"""Which policy version may be sampled from. Pure bookkeeping, no vLLM: this is where a sampler fails closed."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from megarl.checkpoint_engine.wire import Kind, Receipt
from megarl.errors import StaleVersionError, WeightSyncError


@dataclass(frozen=True)
class Staged:
    """Weights that arrived but are not sampled from yet."""

    version: int
    kind: Kind
    checksum: str


class VersionGate:
    """State of one engine: base present or not, resident version, requests in flight.

    A refusal is final: what a failed sync left in the engine is unknown, so only a new engine samples again.
    """

    def __init__(self, base_ready: bool) -> None:
        self._base_ready = base_ready
        self._resident: int | None = None
        self._staged: Staged | None = None
        self._refused: str | None = None
        self._in_flight: Counter[int] = Counter()
        self._loaded: set[int] = set()

    @property
    def resident(self) -> int | None:
        """The version that may be sampled from."""
        return self._resident

    @property
    def in_flight(self) -> int:
        """Requests that are being answered."""
        return sum(self._in_flight.values())

    @contextmanager
    def request(self, version: int) -> Iterator[None]:
        """Hold ``version`` for the duration of a request.

        Raises:
            WeightSyncError: an earlier sync failed.
            StaleVersionError: another version is resident, or none.
        """
        self.check_usable()
        if version != self._resident:
            holds = "holds none yet" if self._resident is None else f"holds version {self._resident}"
            raise StaleVersionError(f"asked for policy version {version}, but the sampler {holds}; sync it first")
        self._in_flight[version] += 1
        try:
            yield
        finally:
            self._in_flight[version] -= 1
        # A refusal while the request ran: what it drew is not trusted.
        self.check_usable()

    def stage(self, receipts: list[Receipt]) -> None:
        """Note what all workers of the engine received; they must agree.

        Raises:
            WeightSyncError: they differ, or a base arrived while requests run.
        """
        found = {Staged(receipt.version, receipt.kind, receipt.checksum) for receipt in receipts}
        if len(found) != 1:
            raise WeightSyncError(f"the engine's workers received different weights: {found}")
        [self._staged] = found
        if self._staged.kind == "adapter":
            self._loaded.add(self._staged.version)

    def base_arrives(self) -> None:
        """Called before base weights are replaced: from here on no version is resident.

        Raises:
            WeightSyncError: requests are running; their tokens would mix two bases.
        """
        if self.in_flight:
            raise WeightSyncError(f"base weights came while {self.in_flight} requests run; wait for them first")
        self._base_ready, self._resident = False, None

    def check_flip(self, version: int, kind: Kind, checksum: str) -> None:
        """Raise ``WeightSyncError`` unless exactly these weights are staged and the base is there for an adapter."""
        self.check_usable()
        asked = Staged(version, kind, checksum)
        if self._staged != asked:
            raise WeightSyncError(f"asked to make {asked} current, but staged is {self._staged}")
        if kind == "adapter" and not self._base_ready:
            raise WeightSyncError(f"adapter version {version} came before the base weights; sync kind 'base' first")

    def flip(self) -> None:
        """Make the staged weights current."""
        assert self._staged is not None
        if self._staged.kind == "adapter":
            self._resident = self._staged.version
        else:
            self._base_ready = True
            self._loaded.clear()
        self._staged = None

    def check_room(self, version: int, slots: int) -> None:
        """Called before an adapter arrives, once idle ones are retired.

        Args:
            version: about to arrive.
            slots: versions that the engine can hold at once.

        Raises:
            WeightSyncError: versions that still serve requests, and the resident one, take all slots.
        """
        live = sorted(self._loaded - {version})
        if len(live) >= slots:
            busy = ", ".join(f"version {other} ({self._in_flight[other]} requests)" for other in live)
            raise WeightSyncError(
                f"policy version {version} would be live version {len(live) + 1} of an engine that holds {slots}: "
                f"{busy} must end first; wait for older requests before the next sync"
            )

    def retirable(self, keep: int | None) -> list[int]:
        """Versions that are loaded, are not ``keep`` and serve no request."""
        return sorted(version for version in self._loaded if version != keep and not self._in_flight[version])

    def retired(self, version: int) -> None:
        """Forget a version that was dropped."""
        self._loaded.discard(version)
        self._in_flight.pop(version, None)

    def refuse(self, reason: str) -> None:
        """Generate nothing any more; the first reason stays."""
        self._refused = self._refused or reason

    def check_usable(self) -> None:
        """Raise ``WeightSyncError`` with the reason after a refusal."""
        if self._refused:
            raise WeightSyncError(f"the sampler refuses to generate: {self._refused}")
