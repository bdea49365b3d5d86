# SPDX-License-Identifier: Apache-2.0
"""Map global ranks to coordinates in the layout and back. Imports no torch.

mcore's order is ``tp-cp-ep-dp-pp``: tensor-parallel neighbours are adjacent ranks, pipeline stages are farthest apart.
Within a pipeline stage the experts have a layout of their own over the same ranks: expert-tensor varies fastest, then
expert, then the copies of an expert (expert data parallel).
"""

from dataclasses import dataclass

from megarl.config import ParallelConfig
from megarl.errors import ConfigError


@dataclass(frozen=True)
class Topology:
    """Sizes of the axes. ``world_size`` is the product of the dense axes; the expert axes divide a stage's ranks."""

    tensor: int = 1
    context: int = 1
    data: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 1

    @classmethod
    def from_config(cls, config: ParallelConfig) -> "Topology":
        """Take the sizes from the ``parallel`` section."""
        return cls(
            tensor=config.tensor,
            context=config.context,
            data=config.data,
            pipeline=config.pipeline,
            virtual_pipeline=config.virtual_pipeline,
            expert=config.expert,
            expert_tensor=config.expert_tensor,
        )

    @property
    def world_size(self) -> int:
        return self.tensor * self.context * self.data * self.pipeline

    def rank(self, *, tensor: int = 0, context: int = 0, data: int = 0, pipeline: int = 0) -> int:
        """Return the global rank at the given coordinates."""
        return tensor + self.tensor * (context + self.context * (data + self.data * pipeline))

    def coordinates(self, rank: int) -> tuple[int, int, int, int]:
        """Return the ``(tensor, context, data, pipeline)`` coordinates of a global rank.

        Raises:
            ConfigError: the rank is outside the layout.
        """
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank {rank} is outside a layout of {self.world_size} ranks")
        tensor = rank % self.tensor
        context = rank // self.tensor % self.context
        data = rank // (self.tensor * self.context) % self.data
        return tensor, context, data, rank // (self.tensor * self.context * self.data)
