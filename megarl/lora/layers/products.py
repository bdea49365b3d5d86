# SPDX-License-Identifier: Apache-2.0
"""Compute the two products of a LoRA update with few passes over the base's wide tensors.

Written out, ``out + cat(low_i @ B_i.T * scaling_i)`` moves the wide output through memory six times and costs more than
the base's own product. Here every part's B is placed in one matrix with the base's row layout, and one product adds to
the output in place. Likewise the gradient through A is added in place to the base layer's gradient of the input.

Shapes: T tokens, O outputs of the fused layer on this rank, R sum of the parts' ranks, r a part's rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from megarl import progress
from megarl.families.base import Fusion
from megarl.model.layers.pointwise import wants_kernels
from megarl.model.layers.regions import traced
from megarl.model.layers.updates import Part, Update, product
from megarl.model.weights.fusion import HeadLayout, part_views


@dataclass(frozen=True)
class Layout:
    """Positions of the parts of an update.

    Attributes:
        places: index of each adapted part among the parts of the layer.
        ranks, scalings: rank and scaling of each adapted part.
        starts: first column of each adapted part; default: one part after the other. Parts may share columns.
        fusion: how the layer's parts are interleaved.
        heads: this rank's attention heads.
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
        """R, the sum of the parts' ranks (shared columns counted once)."""
        return max(start + rank for start, rank in zip(self.starts, self.ranks, strict=True))


def add_wide(
    out: torch.Tensor,
    low: torch.Tensor,
    matrices: Sequence[torch.Tensor],
    layout: Layout,
) -> torch.Tensor:
    """Return ``out`` plus, for each part i, ``scaling_i * low_i @ B_i.T`` at the part's columns.

    Args:
        out: ``[..., O]``; overwritten. A linear's backward does not need its own output. If one does, autograd raises.
        low: ``[..., R]``, the parts' activations side by side.
        matrices: B of each adapted part, ``[rows, r]``.
        layout: positions of the parts.

    Returns:
        ``[..., O]``, in the memory of ``out``.
    """
    if traced():
        return _add_traced(out, low, matrices, layout)
    return _AddWide.apply(out, low, layout, *matrices)


def _add_traced(out: torch.Tensor, low: torch.Tensor, matrices: Sequence[torch.Tensor], layout: Layout) -> torch.Tensor:
    """Return what ``add_wide`` returns, in operations that torch.compile traces and differentiates."""
    wide = matrices[0] if layout.fusion == "single" else _padded(matrices, out.shape[-1], layout)
    rows = torch.addmm(out.flatten(0, -2), low.flatten(0, -2), wide.t(), alpha=factor(layout))
    return rows.view(out.shape)


def _padded(matrices: Sequence[torch.Tensor], width: int, layout: Layout) -> torch.Tensor:
    """Return what ``_assemble`` returns, without writing to a tensor that autograd follows."""
    columns, pieces = layout.columns, []
    views = part_views(matrices[0].new_empty(width, 0), layout.fusion, layout.heads)
    for place, shape in enumerate(view.shape for view in views):
        if place not in layout.places:
            pieces.append(matrices[0].new_zeros(*shape[:-1], columns))
            continue
        index = layout.places.index(place)
        start, rank = layout.starts[index], layout.ranks[index]
        matrix = matrices[index] * layout.scalings[index] if _differ(layout) else matrices[index]
        pieces.append(F.pad(matrix.view(*shape[:-1], rank), (start, columns - start - rank)))
    if layout.fusion == "qkv":  # each group's queries, its key, its value
        query, key, value = pieces
        pieces = [query, key.unsqueeze(1), value.unsqueeze(1)]
    return torch.cat(pieces, dim=1 if layout.fusion == "qkv" else 0).view(-1, columns)


def update_of(low: torch.Tensor, matrices: Sequence[torch.Tensor], layout: Layout) -> Update:
    """Return what ``add_wide`` would add, for a kernel that adds it later."""
    return Update(low, parts_of(matrices, layout))


def parts_of(matrices: Sequence[torch.Tensor], layout: Layout) -> tuple[Part | None, ...]:
    """Return B of each part of the output, in order, with its place; None for a part without an adapter."""
    parts: list[Part | None] = [None] * {"single": 1, "gated": 2, "qkv": 3}[layout.fusion]
    for place, matrix, start, scaling in zip(layout.places, matrices, layout.starts, layout.scalings, strict=True):
        parts[place] = Part(matrix, start, scaling)
    return tuple(parts)


def project_through(hidden: torch.Tensor, matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(hidden, hidden @ matrix.T)``; pass the first to the base layer and nowhere else.

    The gradient of the first is then the base layer's, in fresh memory, and this product's gradient is added to it.

    Args:
        hidden: ``[..., I]``.
        matrix: every part's A, ``[R, I]``.
    """
    return _ProjectThrough.apply(hidden, matrix)


def project(hidden: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return ``hidden @ matrix.T``, through which only ``matrix`` gets a gradient (see ``beside``)."""
    return _Project.apply(hidden, matrix)


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, matrix)
        return F.linear(hidden, matrix)

    @staticmethod
    def backward(ctx: Any, by_low: torch.Tensor) -> Any:
        """Return no gradient of ``hidden``, and that of A, ``[R, I]``."""
        return None, add_through(None, _rows(by_low), *ctx.saved_tensors) if ctx.needs_input_grad[1] else None


class _ProjectThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(hidden, matrix)
        return hidden.detach(), F.linear(hidden, matrix)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradients of ``hidden [..., I]``, over that of the base layer, and of A, ``[R, I]``."""
        hidden, matrix = ctx.saved_tensors
        by_hidden, by_low = (gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients)
        if not ctx.needs_input_grad[1]:
            return by_hidden.addmm_(by_low, matrix).view(hidden.shape), None
        by_matrix = add_through(by_hidden, by_low, hidden, matrix)
        return by_hidden.view(hidden.shape), by_matrix


def add_through(
    by_hidden: torch.Tensor | None, by_low: torch.Tensor, hidden: torch.Tensor, matrix: torch.Tensor
) -> torch.Tensor:
    """Return A's gradient, ``[R, I]``; add what comes through A to ``by_hidden``, unless that is None.

    Args:
        by_hidden: ``[T, I]``; overwritten.
        by_low: ``[T, R]``.
        hidden: ``[..., I]``, T tokens.
        matrix: A, ``[R, I]``.
    """
    if wants_kernels(by_low):
        from megarl.model.layers.kernels import through_gradients as kernel

        if kernel.takes(matrix.shape[0]):
            return kernel.through_gradients(by_hidden, by_low, hidden, matrix)
    if by_hidden is not None:
        by_hidden.addmm_(by_low, matrix)
    return by_low.t() @ _rows(hidden)


class _AddWide(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, out: torch.Tensor, low: torch.Tensor, layout: Layout, *matrices: torch.Tensor
    ) -> torch.Tensor:
        """Add the update of ``low [..., R]`` to ``out [..., O]``, in its memory."""
        progress.made()
        wide = assemble(matrices, out.shape[-1], layout)
        ctx.save_for_backward(low, wide)
        ctx.layout = layout
        # An alias, because autograd refuses to change a view that another Function returned (Transformer Engine's do).
        # The version counter is shared, so a saved ``out`` is still detected.
        total = out.detach()
        _rows(total).addmm_(_rows(low), wide.t(), alpha=factor(layout))
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        progress.made()
        low, wide = ctx.saved_tensors
        rows, scale = gradient.reshape(-1, gradient.shape[-1]), factor(ctx.layout)
        by_low = product(rows, wide, scale).view(low.shape) if ctx.needs_input_grad[1] else None
        needed = any(ctx.needs_input_grad[3:])
        by_matrices = b_gradients(rows, _rows(low), ctx.layout) if needed else [None] * len(ctx.layout.ranks)
        return gradient, by_low, None, *by_matrices


def b_gradients(rows: torch.Tensor, low: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """Return the gradient of each part's B.

    Args:
        rows: gradient of the output, ``[T, O]``.
        low: ``[T, R]``.
        layout: positions of the parts.
    """
    wide = product(rows.t(), low, factor(layout))
    if layout.fusion == "single":
        return [wide]
    gradients = _slots(wide, layout)
    if _differ(layout):
        gradients = [slot * scaling for slot, scaling in zip(gradients, layout.scalings, strict=True)]
    return [slot.reshape(-1, rank) for slot, rank in zip(gradients, layout.ranks, strict=True)]


def _slots(wide: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """Return views of ``wide [O, R]``: the rows and columns of each part, ``[..., r]``."""
    parts = part_views(wide, layout.fusion, layout.heads)
    return [
        parts[place][..., start : start + rank]
        for place, start, rank in zip(layout.places, layout.starts, layout.ranks, strict=True)
    ]


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1, tensor.shape[-1])


def _differ(layout: Layout) -> bool:
    """Return True if the parts have different scalings; these are then applied to each part's B."""
    return len(set(layout.scalings)) > 1


def factor(layout: Layout) -> float:
    """Return the factor that the products apply: the parts' common scaling."""
    return 1.0 if _differ(layout) else layout.scalings[0]


def assemble(matrices: Sequence[torch.Tensor], width: int, layout: Layout) -> torch.Tensor:
    """Place each B at its part's rows and columns of ``[O, R]``, zero elsewhere; times its scaling if they differ."""
    if layout.fusion == "single":
        return matrices[0]
    wide = matrices[0].new_zeros(width, layout.columns)
    for slot, matrix, scaling in zip(_slots(wide, layout), matrices, layout.scalings, strict=True):
        if _differ(layout):
            torch.mul(matrix.view(slot.shape), scaling, out=slot)
        else:
            slot.copy_(matrix.view(slot.shape))
    return wide
