# SPDX-License-Identifier: Apache-2.0
"""LoRA (Hu et al., arXiv:2106.09685) around mcore's column- and row-parallel linears.

Shapes: T tokens (T/TP under sequence parallelism), I input and O output features of the whole layer, r rank.
A is [r, I] and B is [O, r] in the PEFT file. Column-parallel: A is replicated, B split along O. Row-parallel: A is
split along I, B replicated. Only the rank-r activations are communicated, never the wide ones. Routers and experts are
in ``experts.py``.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

from megarl.families.base import Fusion
from megarl.lora.layers.matrices import AdapterMatrices, PartPlan, generator_of
from megarl.lora.layers.products import Layout, add_wide, project_through
from megarl.lora.state import WithBaseNames
from megarl.model.weights.fusion import HeadLayout
from megarl.parallel.groups import Axis


class ParallelLoraLinear(WithBaseNames):
    """A base linear plus its adapters; a drop-in for the base in mcore's modules.

    ``adapters[name]`` holds one adapter's matrices here; ``active`` is the name of the one that computes, or None.
    Parts that it does not adapt gain nothing. Attributes that mcore reads from a linear (``weight``,
    ``sequence_parallel``, ...) come from the base.

    Class attributes of each kind: ``split_A`` and ``split_B`` are the dimensions split over the ranks of ``axis``, None
    for a replicated matrix.
    """

    split_A: ClassVar[int | None] = None
    split_B: ClassVar[int | None] = None
    axis: ClassVar[Axis] = "tensor"

    def __init__(
        self, base: torch.nn.Module, fusion: Fusion, heads: HeadLayout, group: torch.distributed.ProcessGroup
    ) -> None:
        super().__init__()
        self.base_layer = base
        self.training = base.training
        self.fusion, self.heads = fusion, heads
        self.group = group
        self.active: str | None = None
        self.adapters = torch.nn.ModuleDict()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_layer"), name)

    @classmethod
    def split_of(cls, part: PartPlan, side: str) -> int | None:
        """The dimension of a part's A or B that is split over the ranks of ``axis``; None if each holds all of it."""
        if side == "A":
            return cls.split_A
        return cls.split_B if part.copies == 1 else None

    def current(self) -> AdapterMatrices:
        """The active adapter's matrices."""
        return self.adapters[self.active]()

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Base output plus the active adapter's part; the bias passes through."""
        out, bias = self.base_layer(hidden, *args, **kwargs)
        return self.adapt(self.current(), out, hidden) if self.active else out, bias

    def adapt(self, own: AdapterMatrices, out: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Add an adapter's part to the base's output, whose memory it takes over.

        Args:
            own: the adapter's matrices.
            out: what the base made of ``hidden``.
            hidden: what the adapter sees.
        """
        raise NotImplementedError

    def widen(self, own: AdapterMatrices, out: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        """Add every part's scaled B, applied to its columns of ``low``, to ``out``."""
        return add_wide(out, low, self.matrices_b(own), self.layout(own))

    def matrices_b(self, own: AdapterMatrices) -> list[torch.Tensor]:
        """Every part's B, its rows on this rank."""
        return own.matrices_b()

    def layout(self, own: AdapterMatrices) -> Layout:
        """Where an adapter's parts lie in this layer."""
        return Layout(own.places, own.ranks, own.scalings, self.fusion, self.heads, own.starts)

    def factors(self, own: AdapterMatrices, part: PartPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """``(A, B)`` whose product is this rank's slice of the part's update."""
        return own.a_of(part), own.lora_B[part.key]

    def initial(self, part: PartPlan, seed: int) -> dict[str, torch.Tensor]:
        """The whole A and B, float32, from the seed and the module's name alone.

        PEFT's: A is ``kaiming_uniform_(a=sqrt(5))``, which is uniform on +-1 / sqrt(in_features); B is zero.
        """
        bound = part.in_features**-0.5
        matrix_a = torch.empty(part.rank, part.in_features)
        matrix_a.uniform_(-bound, bound, generator=generator_of(part.name, seed))
        return {"A": matrix_a, "B": torch.zeros(part.padded or part.out_features, part.rank)}

    def mark(self, matrix: torch.nn.Parameter, split: int | None) -> None:
        """Set the attributes by which mcore reduces, clips and counts a matrix."""
        mark_parameter(matrix, split, bool(self.base_layer.sequence_parallel))


class _LinearLora(ParallelLoraLinear):
    """What the adapters of tensor-parallel linears share."""

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Base output plus the active adapter's part; the bias passes through."""
        if not self.active:
            return self.base_layer(hidden, *args, **kwargs)
        own = self.current()
        dropped = drop_inputs(self, own.dropout, hidden)
        if dropped is hidden and hidden.requires_grad:
            hidden, low = project_through(hidden, own.matrix_a())
        else:
            low = own.lower(dropped)
        out, bias = self.base_layer(hidden, *args, **kwargs)
        return self.widen(own, out, self._whole(low)), bias

    def adapt(self, own: AdapterMatrices, out: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """As ``forward``, where the adapter's input is not the base layer's."""
        return self.widen(own, out, self.low(own, hidden))

    def low(self, own: AdapterMatrices, hidden: torch.Tensor) -> torch.Tensor:
        """What every part's A makes of (dropped) ``hidden``, for this rank's outputs: ``[..., sum of ranks]``."""
        return self._whole(own.lower(drop_inputs(self, own.dropout, hidden)))

    def _whole(self, low: torch.Tensor) -> torch.Tensor:
        return self.complete(low) if self.group.size() > 1 else low

    def complete(self, low: torch.Tensor) -> torch.Tensor:
        """This rank's product with A, made whole over TP."""
        raise NotImplementedError


class ColumnParallelLora(_LinearLora):
    """Adapter of a layer whose outputs are split over TP; under SP its input is split along the sequence."""

    split_B = 0

    def complete(self, low: torch.Tensor) -> torch.Tensor:
        """``[T/TP or T, ..., sum of ranks] -> [T, ..., sum of ranks]``: all tokens on every TP rank."""
        if self.base_layer.sequence_parallel:
            # A saw only this rank's tokens: its gradient is summed over TP by the parameter's sequence_parallel mark.
            return gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True, group=self.group)
        return copy_to_tensor_model_parallel_region(low, group=self.group)

    def matrices_b(self, own: AdapterMatrices) -> list[torch.Tensor]:
        """Every part's B, its rows on this rank. The gradient of rows that several ranks use is summed over them."""
        parts = zip(filter(None, own.parts), own.matrices_b(), strict=True)
        return [
            self._own_rows(part, copy_to_tensor_model_parallel_region(matrix, group=self.group))
            if part.copies > 1
            else matrix
            for part, matrix in parts
        ]

    def factors(self, own: AdapterMatrices, part: PartPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """``(A, B)`` whose product is this rank's slice of the part's update."""
        return own.a_of(part), self._own_rows(part, own.lora_B[part.key])

    def _own_rows(self, part: PartPlan, matrix: torch.Tensor) -> torch.Tensor:
        if part.copies == 1:
            return matrix
        return matrix.narrow(0, self.group.rank() // part.copies * part.rows, part.rows)


class RowParallelLora(_LinearLora):
    """Adapter of a layer whose inputs are split over TP; under SP its output is split along the sequence."""

    split_A = 1

    def complete(self, low: torch.Tensor) -> torch.Tensor:
        """``[T, ..., r] -> [T/TP or T, ..., r]``, summed over the parts of the input."""
        if self.base_layer.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(low, group=self.group)
        return reduce_from_tensor_model_parallel_region(low, group=self.group)


def drop_inputs(layer: ParallelLoraLinear, dropout: float, hidden: torch.Tensor) -> torch.Tensor:
    """Dropout on the adapter's input. Where TP ranks hold the same tokens and features they must drop the same ones:
    the default generator, which mcore seeds alike on TP ranks. Where they hold different ones: mcore's tracker."""
    if not (layer.training and dropout > 0.0):
        return hidden
    if not isinstance(layer, RowParallelLora) and not layer.base_layer.sequence_parallel:
        return F.dropout(hidden, dropout)
    with get_cuda_rng_tracker().fork():
        return F.dropout(hidden, dropout)


def mark_parameter(parameter: torch.nn.Parameter, split_dim: int | None, sequence_parallel: bool) -> None:
    """Set the attributes by which mcore reduces, clips and counts a parameter.

    Args:
        parameter: an adapter matrix.
        split_dim: the dimension split over TP, or None for a replicated matrix.
        sequence_parallel: whether the ranks of TP see different tokens in it.
    """
    if split_dim is None:
        # No tensor_model_parallel mark: it would be counted once per TP rank in the gradient norm.
        parameter.sequence_parallel = sequence_parallel
        return
    parameter.tensor_model_parallel = True
    parameter.partition_dim = split_dim
    parameter.partition_stride = 1
    parameter.sequence_parallel = False
