# SPDX-License-Identifier: Apache-2.0
"""The two products of a LoRA update, each with as few passes over the base's wide tensors as it can do with.

Written out, ``out + cat(low_i @ B_i.T * scaling_i)`` moves the wide output six times through memory and costs more than
the base's own product. Here all parts' B lie in one matrix with the base's row layout, and one product adds to the
output in place. Likewise the gradient through A is added to the base layer's own gradient of the input in place.

Shapes: T tokens, O outputs of the fused layer on this rank, R sum of the parts' ranks, r a part's rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from megarl.families.base import Fusion
from megarl.model.weights.fusion import HeadLayout, part_views


@dataclass(frozen=True)
class Layout:
    """Where the parts of an update lie.

    Attributes:
        places: each adapted part's index among the parts of the layer.
        ranks, scalings: each adapted part's.
        starts: the first of each part's columns; default: one part's after the other's. Parts may share columns.
        fusion: how the layer's parts interleave.
        heads: on this rank.
    """

    places: tuple[int, ...]
    ranks: tuple[int, ...]
    scalings: tuple[float, ...]
    fusion: Fusion
    heads: HeadLayout
    starts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.starts:
            object.__setattr__(self, "starts", tuple(accumulate(self.ranks, initial=0))[:-1])

    @property
    def columns(self) -> int:
        """R."""
        return max(start + rank for start, rank in zip(self.starts, self.ranks, strict=True))


def add_wide(
    out: torch.Tensor,
    low: torch.Tensor,
    matrices: Sequence[torch.Tensor],
    layout: Layout,
) -> torch.Tensor:
    """``out`` plus, for each part i, ``scaling_i * low_i @ B_i.T`` at the part's columns.

    Args:
        out: ``[..., O]``, written over: a linear does not need its own output again. Autograd raises where it does.
        low: ``[..., R]``, the parts' activations one after the other.
        matrices: each adapted part's B, ``[rows, r]``.
        layout: of the parts.

    Returns:
        ``[..., O]``, in the memory of ``out``.
    """
    return _AddWide.apply(out, low, layout, *matrices)


def project_through(hidden: torch.Tensor, matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``(hidden, hidden @ matrix.T)``, where the first is to go into the base layer, and nowhere else.

    Its gradient is then the base layer's, fresh memory to which this product's is added.

    Args:
        hidden: ``[..., I]``.
        matrix: ``[R, I]``, every part's A.
    """
    return _ProjectThrough.apply(hidden, matrix)


class _ProjectThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(hidden, matrix)
        return hidden.detach(), torch.nn.functional.linear(hidden, matrix)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        hidden, matrix = ctx.saved_tensors
        by_hidden, by_low = (gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients)
        by_matrix = by_low.t() @ _rows(hidden) if ctx.needs_input_grad[1] else None
        return by_hidden.addmm_(by_low, matrix).view(hidden.shape), by_matrix


class _AddWide(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, out: torch.Tensor, low: torch.Tensor, layout: Layout, *matrices: torch.Tensor
    ) -> torch.Tensor:
        """``out [..., O]`` plus the update of ``low [..., R]``, in its memory."""
        wide = _assemble(matrices, out.shape[-1], layout)
        ctx.save_for_backward(low, wide)
        ctx.layout = layout
        # An alias: autograd refuses to change a view that another Function returned (Transformer Engine's do). The
        # version counter is shared, so a saved ``out`` is still noticed.
        total = out.detach()
        _rows(total).addmm_(_rows(low), wide.t(), alpha=_factor(layout))
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        low, wide = ctx.saved_tensors
        rows, scale = gradient.reshape(-1, gradient.shape[-1]), _factor(ctx.layout)
        by_low = _product(rows, wide, scale).view(low.shape) if ctx.needs_input_grad[1] else None
        needed = any(ctx.needs_input_grad[3:])
        by_matrices = _b_gradients(rows, _rows(low), ctx.layout) if needed else [None] * len(ctx.layout.ranks)
        return gradient, by_low, None, *by_matrices


def _b_gradients(rows: torch.Tensor, low: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """The gradient of each part's B.

    Args:
        rows: ``[T, O]``, the output's.
        low: ``[T, R]``.
        layout: of the parts.
    """
    wide = _product(rows.t(), low, _factor(layout))
    if layout.fusion == "single":
        return [wide]
    found = _slots(wide, layout)
    if _differ(layout):
        found = [slot * scaling for slot, scaling in zip(found, layout.scalings, strict=True)]
    return [slot.reshape(-1, rank) for slot, rank in zip(found, layout.ranks, strict=True)]


def _slots(wide: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """Views of ``wide [O, R]``: each part's rows and columns, ``[..., r]``."""
    parts = part_views(wide, layout.fusion, layout.heads)
    return [
        parts[place][..., start : start + rank]
        for place, start, rank in zip(layout.places, layout.starts, layout.ranks, strict=True)
    ]


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1, tensor.shape[-1])


def _product(left: torch.Tensor, right: torch.Tensor, scale: float) -> torch.Tensor:
    """``scale * left @ right``; the product itself scales, before it is rounded."""
    return torch.addmm(right.new_empty(()), left, right, beta=0, alpha=scale)


def _differ(layout: Layout) -> bool:
    """Whether the parts have several scalings, which then go into each part's B."""
    return len(set(layout.scalings)) > 1


def _factor(layout: Layout) -> float:
    """What the products are to apply: the parts' common scaling."""
    return 1.0 if _differ(layout) else layout.scalings[0]


def _assemble(matrices: tuple[torch.Tensor, ...], width: int, layout: Layout) -> torch.Tensor:
    """``[O, R]``: each B at its part's rows and its own columns, times its scaling if they differ, zero elsewhere."""
    if layout.fusion == "single":
        return matrices[0]
    wide = matrices[0].new_zeros(width, layout.columns)
    for slot, matrix, scaling in zip(_slots(wide, layout), matrices, layout.scalings, strict=True):
        if _differ(layout):
            torch.mul(matrix.view(slot.shape), scaling, out=slot)
        else:
            slot.copy_(matrix.view(slot.shape))
    return wide
