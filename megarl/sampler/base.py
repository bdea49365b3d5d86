"""What a sampler is: one engine that answers from exactly one policy version, and takes new versions."""

from typing import Protocol

import numpy as np

from megarl.checkpoint_engine.wire import Kind
from megarl.types import Completion


class Sampler(Protocol):
    """One engine. All methods run on one event loop."""

    async def start(self) -> None:
        """Start the engine; nothing can be sampled before the first sync."""
        ...

    async def generate(self, prompts: list[np.ndarray], version: int) -> list[list[Completion]]:
        """Sample ``sampler.samples_per_prompt`` completions of each prompt from this policy version."""
        ...

    async def receive(self, endpoint: bytes, first: int) -> list[bytes]:
        """``manager.Sink.receive``."""
        ...

    async def flip(self, version: int, kind: Kind, checksum: str) -> None:
        """``manager.Sink.flip``."""
        ...

    async def retire(self, version: int) -> None:
        """``manager.Sink.retire``."""
        ...

    async def refuse(self, reason: str) -> None:
        """``manager.Sink.refuse``."""
        ...

    async def close(self) -> None:
        """Stop the engine and its processes; may be called twice."""
        ...
