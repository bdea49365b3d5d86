# SPDX-License-Identifier: Apache-2.0
"""Adapt routed experts, routers and the gate of shared experts.

Under expert tensor parallelism (ETP) mcore's dispatcher gathers an expert's tokens over the ETP ranks before the
expert, and sums the partial outputs after it, forward and backward. So both matrices can be split: A along its inputs,
B along its outputs. Each rank adds its part and the dispatcher's sums complete it. No parameter is replicated, and
every gradient is complete without a further reduction.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from megarl.lora.layers.dropout import drop_inputs
from megarl.lora.layers.grouped_experts import GroupedAdapters
from megarl.lora.layers.matrices import AdapterMatrices, PartPlan, mark_parameter
from megarl.lora.layers.parallel_linear import ParallelLoraLinear
from megarl.model.layers.experts.grouped import Adapt, NotTogether
from megarl.model.layers.regions import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megarl.parallel.groups import Axis, gather_full
from megarl.parallel.stacks import Groups


class _ExpertLora(ParallelLoraLinear):
    """Common parts of the adapters of an expert's two linears. ``group`` is the expert-tensor-parallel group."""

    split_A = 1
    split_B = 0
    axis: ClassVar[Axis] = "expert_tensor"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # On the first expert's linear, by name: the adapters of all experts.
        self.grouped: dict[str, GroupedAdapters] = {}

    @staticmethod
    def together(linears: "Sequence[_ExpertLora]") -> Adapt | None:
        """Return what computes all experts at once with the active adapter; None if no adapter is active.

        Raises:
            NotTogether: the experts' adapters differ too much.
        """
        names = {linear.active for linear in linears}
        if len(names) > 1:
            raise NotTogether
        [name] = names
        return _grouped(linears, name) if name else None

    @staticmethod
    def stacks(linears: "Sequence[_ExpertLora]") -> Iterator[Groups]:
        """Yield the matrices that one product reads, of each expert: those of every adapter that goes together."""
        for name in linears[0].adapters:
            with suppress(NotTogether, KeyError):  # a linear may lack the adapter
                yield from _grouped(linears, name).stacks

    def mark(self, matrix: torch.nn.Parameter, split: int | None) -> None:
        """Mark the matrix: reduced over the expert's copies only, counted once in the gradient norm."""
        mark_parameter(matrix, split, sequence_parallel=False)
        matrix.allreduce = False

    def low(self, adapter: AdapterMatrices, inputs: torch.Tensor) -> torch.Tensor:
        """Map ``[T, I/ETP]`` to ``[T, sum of ranks]``. The result and its gradient are complete on every rank."""
        low = reduce_from_tensor_model_parallel_region(adapter.lower(inputs), group=self.group)
        return copy_to_tensor_model_parallel_region(low, group=self.group)

    def chunk(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the last dimension."""
        return tensor.chunk(self.group.size(), dim=-1)[self.group.rank()]


def _grouped(linears: Sequence[_ExpertLora], name: str) -> GroupedAdapters:
    """Return the adapters of a name, checked once: to ask each of 128 experts takes the host half a millisecond.

    Raises:
        NotTogether: they differ too much.
    """
    first, last = linears[0].adapters[name], linears[-1].adapters[name]
    known = linears[0].grouped.get(name)
    # Other parameters than before take a CUDA graph's gradients.
    if known is None or not known.is_of(first, last):
        known = linears[0].grouped[name] = GroupedAdapters([linear.adapters[name] for linear in linears])
    return known


class ExpertColumnLora(_ExpertLora):
    """Adapter of an expert's first linear, whose outputs are split over ETP."""

    def adapt(self, adapter: AdapterMatrices, out: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Add the adapter's part to ``out [T, O/ETP]``, from ``hidden [T, I]``."""
        return self.widen(adapter, out, self.low(adapter, self.chunk(hidden)))

    def factors(self, adapter: AdapterMatrices, part: PartPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the factors of this rank's rows of the update, which need the whole A. Collective over ETP."""
        return gather_full(adapter.a_of(part).detach(), 1, self.group), adapter.lora_B[part.key]


class ExpertRowLora(_ExpertLora):
    """Adapter of an expert's second linear, whose inputs are split over ETP and whose partial outputs are summed."""

    def adapt(self, adapter: AdapterMatrices, out: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Add this rank's columns of the adapter's part to ``out [T, O]``, from ``hidden [T, I/ETP]``."""
        delta = adapter.raised(self.low(adapter, hidden))
        before = self.group.rank() * delta.shape[-1]
        return out + F.pad(delta, (before, adapter.only.out_features - delta.shape[-1] - before))

    def factors(self, adapter: AdapterMatrices, part: PartPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the factors of this rank's columns of the update, which need the whole B. Collective over ETP."""
        return adapter.lora_A[part.key], gather_full(adapter.lora_B[part.key].detach(), 0, self.group)


class RouterLora(ParallelLoraLinear):
    """Adapter of a router. Its part is added to the gating logits, before softmax and top-k."""

    def __init__(self, base: torch.nn.Module, *args: Any) -> None:
        super().__init__(base, *args)
        # mcore's router calls its own gating method inside forward, so that method is replaced.
        base.gating = self._gating

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the base router's forward with the adapted gating inside."""
        return self.base_layer(*args, **kwargs)

    def _gating(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = type(self.base_layer).gating(self.base_layer, hidden)
        return self.adapt(self.current(), logits, hidden) if self.active else logits

    def mark(self, matrix: torch.nn.Parameter, split: int | None) -> None:
        """Mark the matrix like the router's weight: under SP the tokens are split over TP."""
        mark_parameter(matrix, split, bool(self.base_layer.config.sequence_parallel))

    def adapt(self, adapter: AdapterMatrices, out: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Add the adapter's part to ``out [..., experts]``, of any dtype, from ``hidden [..., I]``."""
        return out + adapter.raised(adapter.lower(hidden))


class GateLora(ParallelLoraLinear):
    """Adapter of the gate of shared experts. Every tensor-parallel rank holds the whole gate and the whole adapter."""

    def adapt(self, adapter: AdapterMatrices, out: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Add the adapter's part to ``out [T, 1, 1]``, from ``hidden [T, 1, I]``; T/TP tokens under SP."""
        return out + adapter.raised(adapter.lower(drop_inputs(self, adapter.dropout, hidden)))
