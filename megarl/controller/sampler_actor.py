"""A sampler engine as a Ray actor."""

from typing import Any

import numpy as np
import ray

from megarl.config import RunConfig
from megarl.types import Completion


class SamplerEngine:
    """One vLLM engine in its own process; an asynchronous actor, so that a sync can arrive at any time."""

    def __init__(self, config: RunConfig, index: int, threads: int) -> None:
        from megarl.sampler import prepare_environment
        from megarl.sampler.vllm_sampler import VllmSampler

        prepare_environment(threads)
        self.sampler = VllmSampler(config, engine_index=index)

    async def start(self) -> None:
        """Build the engine; nothing can be sampled before the first sync."""
        await self.sampler.start()

    async def node(self) -> str:
        """The Ray node this engine is on."""
        return ray.get_runtime_context().get_node_id()

    async def generate(self, prompts: list[np.ndarray], version: int) -> list[list[Completion]]:
        """See ``Sampler.generate``."""
        return await self.sampler.generate(prompts, version)

    async def receive(self, endpoint: bytes, first: int) -> list[bytes]:
        """See ``checkpoint_engine.manager.Sink``."""
        return await self.sampler.receive(endpoint, first)

    async def flip(self, version: int, kind: Any, checksum: str) -> None:
        """See ``checkpoint_engine.manager.Sink``."""
        await self.sampler.flip(version, kind, checksum)

    async def retire(self, version: int) -> None:
        """See ``checkpoint_engine.manager.Sink``."""
        await self.sampler.retire(version)

    async def refuse(self, reason: str) -> None:
        """See ``checkpoint_engine.manager.Sink``."""
        await self.sampler.refuse(reason)

    async def close(self) -> None:
        """Stop the engine."""
        await self.sampler.close()
