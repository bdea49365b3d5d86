# SPDX-License-Identifier: Apache-2.0
"""Measure an adapter's gradient: its norm, and the matrices that have one, in the reduction that clipping needs."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from megarl.model.optimizer.flat_part import FlatPart
from megarl.model.optimizer.optimizer_shards import Shard
from megarl.model.optimizer.tensor_part import TensorPart

Part = FlatPart | TensorPart


class GradientMeter:
    """Measures the gradient over all ranks without making the host wait.

    Attributes:
        names: PEFT names of all ranks' matrices, sorted. The matrix of each expert is one, even where PEFT stacks them.
    """

    def __init__(
        self,
        parts: list[Part],
        parameters: Mapping[str, torch.nn.Parameter],
        shards: Mapping[torch.nn.Parameter, Shard],
    ) -> None:
        """Learn the names of all ranks' matrices. Collective.

        Args:
            parts: the optimizer's parts.
            parameters: PEFT name -> this rank's parameter.
            shards: from ``optimizer_shards.shards_of``.
        """
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, list(parameters))
        self.names = sorted(set().union(*gathered))
        self._parts = parts
        rows = {name: row for row, name in enumerate(self.names, start=1)}
        self._row_of = {
            id(shards[parameter].main): rows[name] for name, parameter in parameters.items() if parameter in shards
        }
        self._rows: dict[int, torch.Tensor] = {}

    def measure(self, device: torch.device) -> torch.Tensor:
        """Return the gradient's norm (as mcore's ``get_grad_norm``), and for each of ``names`` a number. Collective.

        Args:
            device: device of the model; needed where this rank trains nothing.

        Returns:
            Float32 ``[1 + names]`` on the device: the norm, then 0 for a matrix whose gradient is 0 on all ranks.
        """
        by_group: dict[dist.ProcessGroup, list[Part]] = {}
        for part in self._parts:
            by_group.setdefault(part.mcores.get_grad_stats_parallel_group(), []).append(part)
        total = torch.zeros(1 + len(self.names), device=device)
        for group, parts in by_group.items():
            sums = torch.zeros_like(total)
            for part in parts:
                norms = part.norms()
                if norms.numel():
                    sums.index_add_(0, self._rows_of(part, device), (norms != 0).float())
                    sums[0] += norms.square().sum()
            dist.all_reduce(sums, group=group)
            total += sums
        total[0].sqrt_()
        return total

    def _rows_of(self, part: Part, device: torch.device) -> torch.Tensor:
        """Return the row of each of a part's norms in ``measure``'s result, int64; the same in every step."""
        if id(part) not in self._rows:
            self._rows[id(part)] = torch.tensor([self._row_of[id(main)] for main in part.counted], device=device)
        return self._rows[id(part)]
