# SPDX-License-Identifier: Apache-2.0
"""LoRA on routed experts, routers and the gate of shared experts.

Under expert tensor parallelism (ETP) mcore's dispatcher gathers an expert's tokens over the ETP ranks before it and
sums their partial outputs after it, forward and backward. So both matrices can be split: A along its inputs, B along
its outputs. Each rank adds its part, the dispatcher's own sums complete it, no parameter is replicated, and every
gradient is whole without a further reduction.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)

from megarl.lora.layers.matrices import AdapterMatrices, PartPlan
from megarl.lora.layers.parallel_linear import ParallelLoraLinear, drop_inputs, mark_parameter
from megarl.parallel.groups import Axis, gather_full


class _ExpertLora(ParallelLoraLinear):
    """What the adapters of an expert's two linears share. ``group`` is the expert-tensor-parallel group."""

    split_A = 1
    split_B = 0
    axis: ClassVar[Axis] = "expert_tensor"

    def mark(self, matrix: torch.nn.Parameter, split: int | None) -> None:
        """Reduce over the copies of the expert only, and count it once in the gradient norm."""
        mark_parameter(matrix, split, sequence_parallel=False)
        matrix.allreduce = False

    def low(self, own: AdapterMatrices, inputs: torch.Tensor) -> torch.Tensor:
        """``[T, I/ETP] -> [T, sum of ranks]``, complete on every rank; so is its gradient."""
        low = reduce_from_tensor_model_parallel_region(own.lower(inputs), group=self.group)
        return copy_to_tensor_model_parallel_region(low, group=self.group)

    def chunk(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of the last dimension."""
        return tensor.chunk(self.group.size(), dim=-1)[self.group.rank()]


class ExpertColumnLora(_ExpertLora):
    """Adapter of an expert's first linear, whose outputs are split over ETP."""

    def adapt(self, own: AdapterMatrices, out: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """``out [T, O/ETP]``, ``hidden [T, I]``."""
        return self.widen(own, out, self.low(own, self.chunk(hidden)))

    def factors(self, own: AdapterMatrices, part: PartPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """The update's rows on this rank need the whole A; a collective over ETP."""
        return gather_full(own.a_of(part).detach(), 1, self.group), own.lora_B[part.key]


class ExpertRowLora(_ExpertLora):
    """Adapter of an expert's second linear, whose inputs are split over ETP and whose partial outputs are summed."""

    def adapt(self, own: AdapterMatrices, out: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """``out [T, O]``, of which this rank adds to its part of O; ``hidden [T, I/ETP]``."""
        delta = own.raised(self.low(own, hidden))
        before = self.group.rank() * delta.shape[-1]
        return out + F.pad(delta, (before, own.only.out_features - delta.shape[-1] - before))

    def factors(self, own: AdapterMatrices, part: PartPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """The update's columns on this rank need the whole B; a collective over ETP."""
        return own.lora_A[part.key], gather_full(own.lora_B[part.key].detach(), 0, self.group)


class RouterLora(ParallelLoraLinear):
    """Adapter of a router: the delta is added to the gating logits, before softmax and top-k."""

    def __init__(self, base: torch.nn.Module, *args: Any) -> None:
        super().__init__(base, *args)
        # mcore's router calls its own method between its input and its routing.
        base.gating = self._gating

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The base router's forward, with the adapted gating inside."""
        return self.base_layer(*args, **kwargs)

    def _gating(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = type(self.base_layer).gating(self.base_layer, hidden)
        return self.adapt(self.current(), logits, hidden) if self.active else logits

    def mark(self, matrix: torch.nn.Parameter, split: int | None) -> None:
        """Tokens are split over TP under SP, as for the router's own weight."""
        mark_parameter(matrix, split, bool(self.base_layer.config.sequence_parallel))

    def adapt(self, own: AdapterMatrices, out: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """``out [..., experts]``, perhaps in another dtype than the model's; ``hidden [..., I]``."""
        return out + own.raised(own.lower(hidden))


class GateLora(ParallelLoraLinear):
    """Adapter of the gate of shared experts, whose weight and adapter every tensor-parallel rank holds whole."""

    def adapt(self, own: AdapterMatrices, out: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """``out [T, 1, 1]``, ``hidden [T, 1, I]``; T/TP tokens under SP."""
        return out + own.raised(own.lower(drop_inputs(self, own.dropout, hidden)))
