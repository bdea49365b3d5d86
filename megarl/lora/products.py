"""The two products of a LoRA update, each with as few passes over the base's wide tensors as it can do with.

Written out, ``out + cat(low_i @ B_i.T * scaling_i)`` moves the wide output six times through memory and costs more than
the base's own product. Here all parts' B lie in one matrix with the base's row layout, and one product adds to the
output in place. Likewise the gradient through A is added to the base layer's own gradient of the input in place.

Shapes: T tokens, O outputs of the fused layer on this rank, R sum of the parts' ranks, r a part's rank.
"""

from itertools import accumulate
from typing import Any

import torch

from megarl.model.families.base import Fusion
from megarl.model.fusion import HeadLayout, part_views


def add_wide(
    out: torch.Tensor,
    low: torch.Tensor,
    matrices: list[torch.Tensor],
    places: tuple[int, ...],
    scalings: tuple[float, ...],
    fusion: Fusion,
    heads: HeadLayout,
) -> torch.Tensor:
    """``out`` plus, for each part i, ``scaling_i * low_i @ B_i.T`` at the part's columns.

    Args:
        out: ``[..., O]``, written over: a linear does not need its own output again. Autograd raises where it does.
        low: ``[..., R]``, the parts' activations one after the other.
        matrices: each adapted part's B, ``[rows, r]``.
        places: each matrix's index among the parts of the layer.
        scalings: each part's.
        fusion: how the layer's parts interleave.
        heads: on this rank.

    Returns:
        ``[..., O]``, in the memory of ``out``.
    """
    return _AddWide.apply(out, low, (places, scalings, fusion, heads), *matrices)


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
    def forward(ctx: Any, out: torch.Tensor, low: torch.Tensor, layout: tuple, *matrices: torch.Tensor) -> torch.Tensor:
        scale, layout = _common_scale(layout)
        wide = _assemble(matrices, out.shape[-1], layout)
        ctx.save_for_backward(low, wide)
        ctx.scale, ctx.layout, ctx.ranks = scale, layout, [matrix.shape[1] for matrix in matrices]
        # An alias: autograd refuses to change a view that another Function returned (Transformer Engine's do). The
        # version counter is shared, so a saved ``out`` is still noticed.
        total = out.detach()
        _rows(total).addmm_(_rows(low), wide.t(), alpha=scale)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        low, wide = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        by_low = _product(rows, wide, ctx.scale).view(low.shape) if ctx.needs_input_grad[1] else None
        if not any(ctx.needs_input_grad[3:]):
            return gradient, by_low, None, *(None for _ in ctx.ranks)
        by_wide = _product(rows.t(), _rows(low), ctx.scale)
        return gradient, by_low, None, *_take_apart(by_wide, ctx.ranks, ctx.layout)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1, tensor.shape[-1])


def _product(left: torch.Tensor, right: torch.Tensor, scale: float) -> torch.Tensor:
    """``scale * left @ right``; the product itself scales, before it is rounded."""
    return torch.addmm(right.new_empty(()), left, right, beta=0, alpha=scale)


def _common_scale(layout: tuple) -> tuple[float, tuple]:
    """A scaling that all parts have, for the products to apply, and the layout with what is left for each part."""
    places, scalings, fusion, heads = layout
    if len(set(scalings)) > 1:
        return 1.0, layout
    return scalings[0], (places, None, fusion, heads)


def _slots(wide: torch.Tensor, ranks: list[int], layout: tuple) -> list[torch.Tensor]:
    """Views of ``wide [O, R]``: each part's rows and columns, ``[..., r]``."""
    places, _, fusion, heads = layout
    parts = part_views(wide, fusion, heads)
    starts = accumulate(ranks, initial=0)
    return [parts[place][..., start : start + rank] for place, start, rank in zip(places, starts, ranks, strict=False)]


def _assemble(matrices: tuple[torch.Tensor, ...], width: int, layout: tuple) -> torch.Tensor:
    """``[O, R]``: each B at its part's rows and its own columns, times its scaling if they differ, zero elsewhere."""
    scalings = layout[1]
    if layout[2] == "single":
        return matrices[0]
    ranks = [matrix.shape[1] for matrix in matrices]
    wide = matrices[0].new_zeros(width, sum(ranks))
    for index, (slot, matrix) in enumerate(zip(_slots(wide, ranks, layout), matrices, strict=True)):
        if scalings is None:
            slot.copy_(matrix.view(slot.shape))
        else:
            torch.mul(matrix.view(slot.shape), scalings[index], out=slot)
    return wide


def _take_apart(wide: torch.Tensor, ranks: list[int], layout: tuple) -> list[torch.Tensor]:
    """The gradient of each B from that of the assembled matrix."""
    if layout[2] == "single":
        return [wide]
    slots, scalings = _slots(wide, ranks, layout), layout[1]
    if scalings is not None:
        slots = [slot * scaling for slot, scaling in zip(slots, scalings, strict=True)]
    return [slot.reshape(-1, rank) for slot, rank in zip(slots, ranks, strict=True)]
