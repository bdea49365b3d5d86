"""One product for a base layer and its adapter, where there is room beside the base's weight and the layer's input.

``x W' + low B'`` is ``[x low] [W B]'``, and the gradients of x and low together are ``g [W B]``. Computed apart, the
products with B only read and write the wide output, three times for a few operations per element; at rank 16 they cost
a small model a tenth of its step. Together they cost ``R / I`` of the base's product. So the base's weight moves into a
matrix with R more columns, once, and what makes the input leaves as many behind each of its rows.

Shapes: T tokens, I inputs and O outputs of the layer on this rank, R sum of the parts' ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megarl.errors import MegarlError
from megarl.lora.products import Layout, fill_slots, wide_gradients
from megarl.model.kernels.rows import as_rows

# Rows of 16-bit matrices start at multiples of 16 bytes, or the products are slow.
ALIGNED = 8


@dataclass
class Room:
    """A base weight with columns beside it for B.

    Attributes:
        wide: ``[O, I + R]``: the weight, and each part's B times its scaling in its own columns.
        layout: of the adapters that it has room for; the columns that it leaves free stay zero.
    """

    wide: torch.Tensor
    layout: Layout
    _holds: tuple[int, ...] = ()

    @staticmethod
    def beside(weight: torch.nn.Parameter, layout: Layout) -> "Room":
        """Move a weight's data into a matrix with room."""
        rows, width = weight.shape
        wide = weight.data.new_zeros(rows, width + layout.columns)
        wide[:, :width] = weight.data
        weight.data = wide[:, :width]
        return Room(wide, layout)

    @property
    def columns(self) -> int:
        """R."""
        return self.layout.columns

    def fits(self, places: tuple[int, ...], ranks: tuple[int, ...]) -> bool:
        """Whether an adapter's parts lie in this room's rows and columns."""
        return (places, ranks) == (self.layout.places, self.layout.ranks)

    def weight(self, base: torch.nn.Module) -> torch.Tensor:
        """The base's weight, ``[O, I]``.

        Raises:
            MegarlError: it lies elsewhere by now: the model was moved or cast.
        """
        if base.weight.data_ptr() != self.wide.data_ptr():
            raise MegarlError(
                "a base weight was moved or cast after an adapter had computed with it; build the model where and in "
                "the dtype in which it is to run, then apply LoRA"
            )
        return base.weight

    def fill(self, matrices: Sequence[torch.Tensor], layout: Layout) -> None:
        """Write an adapter's B. Always: one update later they are others."""
        fill_slots(self.wide[:, -self.columns :], matrices, layout, scaled=True)
        self._holds = _addresses(matrices)

    def holds(self, matrices: Sequence[torch.Tensor]) -> bool:
        """Whether these were the last that were written."""
        return self._holds == _addresses(matrices)


def can_make_room(base: torch.nn.Module, layout: Layout) -> bool:
    """Whether a linear is ``x W'`` with a frozen ordinary W (no bias, no low precision) whose rows stay aligned."""
    weight, bias, config = base.weight, getattr(base, "bias", None), getattr(base, "config", None)
    plain = type(weight) is torch.nn.Parameter and not weight.requires_grad and (bias is None or not bias.numel())
    exact = not getattr(config, "fp8", None) and not getattr(config, "fp4", None)
    return plain and exact and layout.columns % ALIGNED == 0 and weight.shape[1] % ALIGNED == 0


def one_product(
    hidden: torch.Tensor, matrix_a: torch.Tensor, matrices: Sequence[torch.Tensor], layout: Layout, room: Room, *,
    spare: bool,
) -> torch.Tensor:  # fmt: skip
    """``hidden @ W.T``, and for each part i ``scaling_i * hidden @ A_i.T @ B_i.T`` at its columns.

    Args:
        hidden: ``[..., I]``.
        matrix_a: ``[R, I]``, every part's A.
        matrices: each part's B.
        layout: of the parts.
        room: of the layer's weight, for this layout.
        spare: ``hidden`` leaves R columns unwritten behind each row, for this call to use; else it is copied.

    Returns:
        ``[..., O]``.
    """
    return _OneProduct.apply(hidden, matrix_a, room, layout, spare, *matrices)


class _OneProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, matrix_a: torch.Tensor, room: Room, layout: Layout, spare: bool,
        *matrices: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """As ``one_product``; keeps ``[x low]`` ``[T, I + R]``, A and each B for the backward pass."""
        width = hidden.shape[-1]
        both = _both(hidden, room.columns, spare)
        torch.mm(both[:, :width], matrix_a.t(), out=both[:, width:])
        room.fill(matrices, layout)
        ctx.save_for_backward(both, matrix_a, *matrices)
        ctx.room, ctx.layout, ctx.shape = room, layout, hidden.shape
        return (both @ room.wide.t()).view(*hidden.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """From ``[..., O]`` to the gradients of hidden ``[..., I]``, A ``[R, I]`` and each B ``[rows, r]``."""
        both, matrix_a, *matrices = ctx.saved_tensors
        by_hidden_needed, by_a_needed, _, _, _, *needed = ctx.needs_input_grad
        room, rows, width = ctx.room, as_rows(gradient), ctx.shape[-1]
        if not room.holds(matrices):  # another adapter computed in between
            room.fill(matrices, ctx.layout)
        first = 0 if by_hidden_needed else width
        found = rows @ room.wide[:, first:]
        by_low = found[:, width - first :]
        by_a = by_low.t() @ both[:, :width] if by_a_needed else None
        by_hidden = found[:, :width].addmm_(by_low, matrix_a).view(ctx.shape) if by_hidden_needed else None
        by_b = wide_gradients(rows, both[:, width:], ctx.layout) if any(needed) else [None] * len(matrices)
        return by_hidden, by_a, None, None, None, *by_b


def _both(hidden: torch.Tensor, columns: int, spare: bool) -> torch.Tensor:
    """``[T, I + columns]`` whose first I columns are ``hidden``."""
    rows = as_rows(hidden.detach())
    tokens, width = rows.shape
    if spare:
        assert rows.stride(0) == width + columns
        return rows.as_strided((tokens, width + columns), rows.stride())
    both = rows.new_empty(tokens, width + columns)
    both[:, :width] = rows
    return both


def _addresses(matrices: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple(matrix.data_ptr() for matrix in matrices)
