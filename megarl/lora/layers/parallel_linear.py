# SPDX-License-Identifier: Apache-2.0
"""LoRA (Hu et al., arXiv:2106.09685) around mcore's column- and row-parallel linears.

Shapes: T tokens (T/TP under sequence parallelism), I input and O output features of the whole layer, r rank. A is [r,
I] and B is [O, r] in the PEFT file. Column-parallel: A is replicated, B split along O. Row-parallel: A is split along
I, B replicated. Only rank-r activations are communicated, never the wide ones. Routers and experts are in
``experts.py``.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from megarl.families.base import Fusion
from megarl.lora.layers.beside import linear_beside, with_bias, with_rows_behind
from megarl.lora.layers.dropout import drop_inputs
from megarl.lora.layers.matrices import AdapterMatrices, PartPlan, generator_of, mark_parameter
from megarl.lora.layers.overlapped import can_overlap, column_linear, row_linear
from megarl.lora.layers.products import Layout, add_wide, project, project_through, update_of
from megarl.lora.layers.state import WithBaseNames
from megarl.lora.layers.traced_linear import numbers_of
from megarl.model.layers.linears import ColumnParallelLinear, RowParallelLinear
from megarl.model.layers.pointwise import wants_kernels
from megarl.model.layers.regions import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    traced,
)
from megarl.model.layers.updates import Operands, Outcome
from megarl.model.weights.fusion import HeadLayout
from megarl.parallel.groups import Axis

# Linears that ``traced_linear`` computes together with their adapters: frozen ones whose weight is one matrix.
TRACED = (ColumnParallelLinear, RowParallelLinear)
# Rank that a kernel's tile may hold. A product of its own is faster above.
MOST_RANKS = 128


class ParallelLoraLinear(WithBaseNames):
    """A base linear with its adapters. It replaces the base in mcore's modules.

    ``adapters[name]`` holds one adapter's matrices; ``active`` is the name of the adapter that computes, or None. Parts
    that it does not adapt are not changed. ``place`` is the linear's number within a compiled layer. Attributes that
    mcore reads from a linear (``weight``, ``sequence_parallel``, ...) come from the base.

    Each subclass sets ``split_A`` and ``split_B``, the dimensions that are split over the ranks of ``axis``; None means
    replicated. ``splits_inputs``: each rank of ``axis`` has features of its own.
    """

    split_A: ClassVar[int | None] = None
    split_B: ClassVar[int | None] = None
    axis: ClassVar[Axis] = "tensor"
    splits_inputs: ClassVar[bool] = False
    place = 0

    def __init__(
        self, base: torch.nn.Module, fusion: Fusion, heads: HeadLayout, group: torch.distributed.ProcessGroup
    ) -> None:
        super().__init__()
        self.base_layer = base
        self.training = base.training
        self.fusion, self.heads = fusion, heads
        self.group = group
        self.active: str | None = None
        self.room: torch.Tensor | None = None
        self.adapters = torch.nn.ModuleDict()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_layer"), name)

    @classmethod
    def split_of(cls, part: PartPlan, side: str) -> int | None:
        """Return the dimension of a part's A or B that is split over the ranks of ``axis``; None if there is none."""
        if side == "A":
            return cls.split_A
        return cls.split_B if part.copies == 1 else None

    def current(self) -> AdapterMatrices:
        """Return the active adapter's matrices."""
        adapter = self.adapters[self.active]
        # Its hooks cannot be traced; they ran before the compiled layer.
        return adapter if traced() else adapter()

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the base output plus the active adapter's part, and the base's bias unchanged."""
        out, bias = self.base_layer(hidden, *args, **kwargs)
        return self.adapt(self.current(), out, hidden) if self.active else out, bias

    def adapt(self, adapter: AdapterMatrices, out: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Add an adapter's part to the base's output, in place.

        Args:
            adapter: the adapter's matrices.
            out: the base's output for ``hidden``.
            hidden: the adapter's input.
        """
        raise NotImplementedError

    def widen(self, adapter: AdapterMatrices, out: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        """Multiply each part's columns of ``low`` by its scaled B and add the result to ``out``."""
        return add_wide(out, low, self.matrices_b(adapter), self.layout(adapter))

    def matrices_b(self, adapter: AdapterMatrices) -> list[torch.Tensor]:
        """Return this rank's rows of every part's B."""
        return adapter.matrices_b()

    def layout(self, adapter: AdapterMatrices) -> Layout:
        """Return the positions of an adapter's parts in this layer."""
        return Layout(adapter.places, adapter.ranks, adapter.scalings, self.fusion, self.heads, adapter.starts)

    def factors(self, adapter: AdapterMatrices, part: PartPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(A, B)`` whose product is this rank's slice of the part's update."""
        return adapter.a_of(part), adapter.lora_B[part.key]

    def initial(self, part: PartPlan, seed: int) -> dict[str, torch.Tensor]:
        """Draw the whole A and B, float32, from the seed and the module's name alone.

        As in PEFT, A is ``kaiming_uniform_(a=sqrt(5))``, which is uniform on +-1 / sqrt(in_features), and B is zero.
        """
        bound = part.in_features**-0.5
        matrix_a = torch.empty(part.rank, part.in_features)
        matrix_a.uniform_(-bound, bound, generator=generator_of(part.name, seed))
        return {"A": matrix_a, "B": torch.zeros(part.padded or part.out_features, part.rank)}

    def make_room(self, adapter: AdapterMatrices) -> None:
        """Prepare the base's weight for an adapter that is trained. Called once the adapter is there."""

    def mark(self, matrix: torch.nn.Parameter, split: int | None) -> None:
        """Set the attributes by which mcore reduces, clips and counts a matrix."""
        mark_parameter(matrix, split, bool(self.base_layer.sequence_parallel))


class _LinearLora(ParallelLoraLinear):
    """Common parts of the adapters of tensor-parallel linears. ``linear`` computes base and adapter together."""

    linear: ClassVar[Callable[..., torch.Tensor]]

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the base output plus the active adapter's part, and the base's bias unchanged."""
        if not self.active:
            return self.base_layer(hidden, *args, **kwargs)
        adapter = self.current()
        if getattr(self.base_layer, "bitwise", False):
            return self._bitwise(adapter, hidden), None
        dropped = drop_inputs(self, adapter.dropout, hidden)
        if dropped is hidden and traced() and isinstance(self.base_layer, TRACED) and self.group.size() == 1:
            return self._traced(adapter, hidden)
        if dropped is hidden and not traced() and can_overlap(self.base_layer):
            return self._overlapped(adapter, hidden)
        if dropped is hidden and hidden.requires_grad and not traced():
            hidden, low = project_through(hidden, adapter.matrix_a())
        else:
            low = adapter.lower(dropped)
        out, bias = self.base_layer(hidden, *args, **kwargs)
        return self.widen(adapter, out, self._whole(low)), bias

    def apart(self, hidden: torch.Tensor, low: torch.Tensor | None = None, *, through: bool = True) -> Outcome:
        """Return the base's output and the update to be added; whole outputs where an update cannot be left.

        See ``megarl.model.layers.updates``.
        """
        if not self._leaves():
            return self(hidden)
        adapter = self.current()
        if low is None:
            dropped = drop_inputs(self, adapter.dropout, hidden)
            through = dropped is hidden and hidden.requires_grad
            low = project(hidden, adapter.matrix_a()) if through else adapter.lower(dropped)
        if through:
            (out, bias), low = linear_beside(self.base_layer, hidden, low, adapter.matrix_a(), self.room)
        else:
            out, bias = self.base_layer(hidden)
        if bias is not None:
            return self.widen(adapter, out, low), bias
        return out, update_of(low, self.matrices_b(adapter), self.layout(adapter))

    def projection(self) -> torch.Tensor | None:
        """Return every A, ``[R, I]``, if ``apart`` takes the product of its input with them; else None."""
        if not self._leaves():
            return None
        adapter = self.current()
        return None if self.training and adapter.dropout > 0.0 else adapter.matrix_a()

    def operands(self) -> Operands | None:
        """Return what an operation of a compiled layer, which has waited for the adapter, needs; None if it cannot."""
        adapter = self.adapters[self.active] if self._takes_kernels() and self.base_layer.bias is None else None
        if adapter is None or (self.training and adapter.dropout > 0.0):
            return None
        matrices, weight = (adapter.read_together(), self.matrices_b(adapter)), self.base_layer.weight
        return Operands(weight, *matrices, adapter.columns, adapter.factors, self.room)

    def _leaves(self) -> bool:
        """Return True if a kernel outside traces can add the update."""
        return not traced() and self._takes_kernels()

    def _takes_kernels(self) -> bool:
        """Return True if kernels can add the update: on one rank, of ranks that a tile can hold."""
        return bool(self.active) and self._alone() and max(self.adapters[self.active].ranks) <= MOST_RANKS

    def _alone(self) -> bool:
        """Return True if the base is one frozen matrix on one rank, whose product can be formed here."""
        base = self.base_layer
        return self.group.size() == 1 and isinstance(base, TRACED) and not base.weight.requires_grad

    def make_room(self, adapter: AdapterMatrices) -> None:
        """Let an adapter's A lie behind the base's weight; see ``linear_beside``. Moves the weight."""
        weight = self.base_layer.weight
        rows = self.layout(adapter).columns
        held = self.room is not None and len(self.room) >= len(weight) + rows
        if not held and wants_kernels(weight) and self._alone():
            self.room = with_rows_behind(weight, rows)

    def _traced(self, adapter: AdapterMatrices, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return what ``forward`` does, by one operator; on one rank."""
        matrices, layout = self.matrices_b(adapter), numbers_of(self.layout(adapter))
        base, matrix_a = self.base_layer, adapter.matrix_a()
        return with_bias(base, torch.ops.megarl.adapted_linear(hidden, base.weight, matrix_a, matrices, *layout)[0])

    def _overlapped(self, adapter: AdapterMatrices, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return what ``forward`` does, with collectives that run beside the products; under sequence parallelism."""
        matrices, layout, weight = self.matrices_b(adapter), self.layout(adapter), self.base_layer.weight
        return with_bias(self.base_layer, self.linear(hidden, weight, adapter.matrix_a(), matrices, layout, self.group))

    def _bitwise(self, adapter: AdapterMatrices, hidden: torch.Tensor) -> torch.Tensor:
        from megarl.lora.layers.bitwise import adapted_linear

        base, flat = self.base_layer, hidden.view(-1, hidden.shape[-1])
        out = adapted_linear(
            flat, base.weight, base.bias, adapter.matrix_a(), self.matrices_b(adapter), self.layout(adapter)
        )
        return out.view(*hidden.shape[:-1], -1)

    def adapt(self, adapter: AdapterMatrices, out: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Add the adapter's part where the adapter's input is not the base layer's."""
        return self.widen(adapter, out, self.low(adapter, hidden))

    def low(self, adapter: AdapterMatrices, hidden: torch.Tensor) -> torch.Tensor:
        """Multiply (dropped) ``hidden`` by every part's A, for this rank's outputs: ``[..., sum of ranks]``."""
        return self._whole(adapter.lower(drop_inputs(self, adapter.dropout, hidden)))

    def _whole(self, low: torch.Tensor) -> torch.Tensor:
        return self.complete(low) if self.group.size() > 1 else low

    def complete(self, low: torch.Tensor) -> torch.Tensor:
        """Complete this rank's product with A over TP."""
        raise NotImplementedError


class ColumnParallelLora(_LinearLora):
    """Adapter of a layer whose outputs are split over TP. Under SP its input is split along the sequence."""

    split_B = 0
    linear = staticmethod(column_linear)

    def complete(self, low: torch.Tensor) -> torch.Tensor:
        """Gather all tokens on every TP rank: ``[T/TP or T, ..., sum of ranks]`` -> ``[T, ..., sum of ranks]``."""
        if self.base_layer.sequence_parallel:
            # A was applied to this rank's tokens only. Its gradient is summed over TP because the parameter is marked
            # sequence_parallel.
            return gather_from_sequence_parallel_region(low, group=self.group)
        return copy_to_tensor_model_parallel_region(low, group=self.group)

    def matrices_b(self, adapter: AdapterMatrices) -> list[torch.Tensor]:
        """Return this rank's rows of every part's B. Backward sums the gradient of rows that several ranks use."""
        parts = zip(filter(None, adapter.parts), adapter.matrices_b(), strict=True)
        return [
            self._local_rows(part, copy_to_tensor_model_parallel_region(matrix, group=self.group))
            if part.copies > 1
            else matrix
            for part, matrix in parts
        ]

    def factors(self, adapter: AdapterMatrices, part: PartPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(A, B)`` whose product is this rank's slice of the part's update."""
        return adapter.a_of(part), self._local_rows(part, adapter.lora_B[part.key])

    def _local_rows(self, part: PartPlan, matrix: torch.Tensor) -> torch.Tensor:
        if part.copies == 1:
            return matrix
        return matrix.narrow(0, self.group.rank() // part.copies * part.rows, part.rows)


class RowParallelLora(_LinearLora):
    """Adapter of a layer whose inputs are split over TP. Under SP its output is split along the sequence."""

    split_A = 1
    splits_inputs = True
    linear = staticmethod(row_linear)

    def complete(self, low: torch.Tensor) -> torch.Tensor:
        """Sum over the parts of the input: ``[T, ..., r]`` -> ``[T/TP or T, ..., r]``."""
        if self.base_layer.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(low, group=self.group)
        return reduce_from_tensor_model_parallel_region(low, group=self.group)
