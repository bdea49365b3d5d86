# SPDX-License-Identifier: Apache-2.0
"""Call one sampler engine."""

from concurrent.futures import Future
from typing import Any

from megarl.checkpoint_engine.wire import Kind
from megarl.controller.actors.calls import as_future
from megarl.controller.actors.direct import DirectActor
from megarl.controller.actors.pulse import Watch


class EngineHandle:
    """One sampler engine; a ``Sink`` of a weight sync. It stays the same when the engine is started again.

    Attributes:
        actor: the present actor.
        name, index: of the engine.
        receivers: its vLLM workers.
        lost: why nothing is sent to it, if it died or hangs; None while it lives.
        closed: True if nothing is sent to it until it is readmitted, because it refuses to generate.
        opened: how many times it came back.
    """

    def __init__(self, actor: Any, index: int, receivers: int, watch: Watch) -> None:
        self.actor, self.name, self.index, self.receivers = actor, f"sampler {index}", index, receivers
        self._watch, self._direct = watch, DirectActor(self.name, watch)
        self.lost: str | None = None
        self.closed, self.opened = False, 0

    def places(self, sender: Any) -> Future:
        """See ``checkpoint_engine.participants.Sink``."""
        return as_future({self.name: self.actor.places.remote(sender)}, self._watch)

    def receive(self, endpoint: bytes, first: int) -> Future:
        """See ``checkpoint_engine.participants.Sink``."""
        return self._direct.call(self.actor, "receive", endpoint, first)

    def flip(self, version: int, kind: Kind, checksum: str) -> Future:
        """See ``checkpoint_engine.participants.Sink``."""
        return self._direct.call(self.actor, "flip", version, kind, checksum)

    def refuse(self, reason: str) -> Future:
        """See ``checkpoint_engine.participants.Sink``."""
        self.closed = True
        return as_future({self.name: self.actor.refuse.remote(reason)}, self._watch)

    def readmit(self) -> Future:
        """See ``checkpoint_engine.participants.Sink``."""
        self.closed = True
        return as_future({self.name: self.actor.readmit.remote()}, self._watch)
