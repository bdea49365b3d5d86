# SPDX-License-Identifier: Apache-2.0
"""Decide which policy version may be sampled from. Pure bookkeeping without vLLM; this makes a sampler fail closed."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from megarl.checkpoint_engine.records import Receipt
from megarl.checkpoint_engine.wire import Kind
from megarl.errors import StaleVersionError, WeightSyncError


@dataclass(frozen=True)
class Staged:
    """Weights that have arrived, or are arriving, and are not sampled from yet.

    Attributes:
        version, kind: of the weights.
        checksum: of what the workers hold; None if they tell it to the trainer, not to this engine.
    """

    version: int
    kind: Kind
    checksum: str | None


class VersionGate:
    """State of one engine: whether the base is present, the resident version, the requests in flight.

    A refusal is final. What a failed sync left in the engine is unknown, so it needs a new gate, base and policy.

    Args:
        base_ready: True if vLLM read the base from disk.
        content: ``checkpoint_engine.content`` of the engine.
    """

    def __init__(self, base_ready: bool, content: Kind = "adapter") -> None:
        self._base_ready, self._content = base_ready, content
        # True while the base is the one that vLLM read from disk, which a readmission need not bring again.
        self._untouched = base_ready
        self._resident: int | None = None
        self._staged: Staged | None = None
        self._refused: str | None = None
        self._in_flight: Counter[int] = Counter()
        self._loaded: set[int] = set()

    @property
    def resident(self) -> int | None:
        """The version that may be sampled from; None if there is none."""
        return self._resident

    @property
    def in_flight(self) -> int:
        """Number of requests that are being answered."""
        return sum(self._in_flight.values())

    @property
    def live(self) -> int:
        """Number of adapters that are resident or serve requests."""
        return sum(version == self._resident or self._in_flight[version] > 0 for version in self._loaded)

    @contextmanager
    def request(self, version: int) -> Iterator[None]:
        """Keep ``version`` resident for the duration of a request.

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
        # If a refusal came while the request ran, its completions are not trusted.
        self.check_usable()

    def stage(self, receipts: list[Receipt]) -> None:
        """Record what all workers of the engine received. They must agree.

        Raises:
            WeightSyncError: the workers' receipts differ.
        """
        received = {Staged(receipt.version, receipt.kind, receipt.checksum) for receipt in receipts}
        if len(received) != 1:
            raise WeightSyncError(f"the engine's workers received different weights: {received}")
        self._set_staged(*received)

    def arm(self, version: int, kind: Kind, receipts: list[Receipt]) -> None:
        """Record that weights have arrived, or that the workers receive them and will tell the trainer.

        Args:
            version, kind: of the weights.
            receipts: the workers' receipts; none if the trainer gets them. No worker samples from weights that it has
                not verified itself.

        Raises:
            WeightSyncError: the workers' receipts differ.
        """
        if receipts:
            self.stage(receipts)
        else:
            self._set_staged(Staged(version, kind, None))

    def _set_staged(self, staged: Staged) -> None:
        self._staged = staged
        if staged.kind == "adapter":
            self._loaded.add(staged.version)

    def check_kind(self, kind: Kind) -> None:
        """Raise ``WeightSyncError`` unless the engine was started for such weights."""
        if kind not in ("base", self._content):
            raise WeightSyncError(
                f"{kind} weights came, but the engine was started with checkpoint_engine.content={self._content}; give "
                "trainer and sampler the same value"
            )

    def overwrite(self, kind: Kind) -> None:
        """Mark all versions as not resident, before weights that requests compute with are replaced in place.

        Raises:
            WeightSyncError: requests are running; their tokens would mix two policies.
        """
        if self.in_flight:
            raise WeightSyncError(f"{kind} weights came while {self.in_flight} requests run; wait for them first")
        self._base_ready, self._resident = self._base_ready and kind != "base", None
        self._untouched = False

    def check_flip(self, version: int, kind: Kind, checksum: str) -> None:
        """Raise ``WeightSyncError`` unless exactly these weights are staged, and for a policy the base is present."""
        self.check_usable()
        asked, staged = Staged(version, kind, checksum), self._staged
        if staged is None or staged != (asked if staged.checksum else replace(asked, checksum=None)):
            raise WeightSyncError(f"asked to make {asked} current, but staged is {staged}")
        if kind != "base" and not self._base_ready:
            raise WeightSyncError(f"{kind} version {version} came before the base weights; sync kind 'base' first")

    def flip(self) -> None:
        """Switch to the staged weights."""
        assert self._staged is not None
        if self._staged.kind == "base":
            self._base_ready = True
            self._loaded.clear()
        else:
            self._resident = self._staged.version
        self._staged = None

    def make_room(self, version: int, slots: int) -> list[int]:
        """Retire idle versions before an adapter arrives; return those that stay.

        Args:
            version: version that is about to arrive.
            slots: number of versions that the engine can hold at once.

        Raises:
            WeightSyncError: all slots are taken by the resident version and versions that still serve requests.
        """
        kept = self.retire_idle()
        live = [other for other in kept if other != version]
        if len(live) >= slots:
            busy = ", ".join(f"version {other} ({self._in_flight[other]} requests)" for other in live)
            raise WeightSyncError(
                f"policy version {version} would be live version {len(live) + 1} of an engine that holds {slots}: "
                f"{busy} must end first; wait for older requests before the next sync"
            )
        return kept

    def retire_idle(self) -> list[int]:
        """Forget the versions that serve no request and are not resident; return those that stay."""
        for version in list(self._loaded):
            if version != self._resident and not self._in_flight[version]:
                self._loaded.discard(version)
                self._in_flight.pop(version, None)
        return sorted(self._loaded)

    def refuse(self, reason: str) -> None:
        """Refuse to generate from now on; the first reason is kept."""
        self._refused = self._refused or reason

    def renewed(self) -> "VersionGate":
        """Return a gate of the same engine that knows of no weights but a base that vLLM read from disk."""
        return VersionGate(self._untouched, self._content)

    def check_usable(self) -> None:
        """Raise ``WeightSyncError`` with the reason if the engine refuses."""
        if self._refused:
            raise WeightSyncError(f"the sampler refuses to generate: {self._refused}")
