# SPDX-License-Identifier: Apache-2.0
"""A frozen linear with its adapter as one operator, for code that torch.compile traces.

The compiler would write each product to memory of its own and copy the wide ones once more to add them. Inside this
operator the adapter's products are added in place, forward and backward, as ``products`` does without a compiler. On
CUDA in 16 bits one kernel forms both gradients of an adapter's side (``narrow_gradients``, ``through_gradients``).

Shapes: T tokens, I inputs, O outputs on this rank, R sum of the parts' ranks, r a part's rank.
"""

from collections.abc import Sequence
from typing import Any, get_args

import torch

from megarl.families.base import Fusion
from megarl.lora.layers.products import Layout, add_through, assemble, b_gradients, factor, update_of
from megarl.model.layers.pointwise import has_kernels
from megarl.model.layers.traced.operators import operator
from megarl.model.layers.updates import flattened, product, update_gradients
from megarl.model.weights.fusion import HeadLayout

FUSIONS: tuple[Fusion, ...] = get_args(Fusion)


def numbers_of(layout: Layout) -> tuple[list[int], list[float]]:
    """Return a layout as an operator takes it: integers, and the parts' scalings."""
    heads, parts = layout.heads, (layout.places, layout.ranks, layout.starts)
    form = [FUSIONS.index(layout.fusion), heads.groups, heads.queries, heads.head_dim]
    return [*form, *(number for part in zip(*parts, strict=True) for number in part)], list(layout.scalings)


def _layout_of(numbers: Sequence[int], scalings: Sequence[float]) -> Layout:
    fusion, groups, queries, head_dim, *parts = numbers
    heads = HeadLayout(groups, queries, head_dim)
    return Layout(
        tuple(parts[::3]), tuple(parts[1::3]), tuple(scalings), FUSIONS[fusion], heads, starts=tuple(parts[2::3])
    )


@operator("adapted_linear")
def adapted_linear(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    matrix_a: torch.Tensor,
    matrices: list[torch.Tensor],
    numbers: list[int],
    scalings: list[float],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``hidden @ weight.T``, plus ``scaling * (hidden @ A.T) @ B.T`` at each part's columns.

    Args:
        hidden: ``[T, 1, I]``.
        weight: the base's, ``[O, I]``; gets no gradient.
        matrix_a: every part's A, ``[R, I]``.
        matrices: B of each adapted part, ``[O of the part, r]``.
        numbers, scalings: of ``numbers_of``.

    Returns:
        The output ``[T, 1, O]``, and ``hidden @ matrix_a.T`` ``[T, R]`` for the backward pass.
    """
    layout, rows = _layout_of(numbers, scalings), hidden.reshape(-1, hidden.shape[-1])
    low, out = rows @ matrix_a.t(), rows @ weight.t()
    out.addmm_(low, assemble(matrices, len(weight), layout).t(), alpha=factor(layout))
    return out.view(*hidden.shape[:-1], len(weight)), low


@adapted_linear.register_fake
def _(hidden: Any, weight: Any, matrix_a: Any, *parts: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out = hidden.new_empty(*hidden.shape[:-1], weight.shape[0])
    # Not Size.numel(), which would make a constant of T.
    return out, hidden.new_empty(hidden.shape[0] * hidden.shape[1], matrix_a.shape[0])


@operator("adapted_linear_backward")
def adapted_linear_backward(
    gradient: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    matrix_a: torch.Tensor,
    matrices: list[torch.Tensor],
    low: torch.Tensor,
    numbers: list[int],
    scalings: list[float],
    needs_hidden: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of ``hidden`` (no elements unless ``needs_hidden``), ``matrix_a``, and all B's, flat."""
    layout = _layout_of(numbers, scalings)
    slope, rows = gradient.reshape(-1, gradient.shape[-1]), hidden.reshape(-1, hidden.shape[-1])
    by_low, by_matrices = _by_update(slope, low, matrices, layout)
    by_hidden = slope @ weight if needs_hidden else None
    by_matrix = add_through(by_hidden, by_low, rows, matrix_a)
    whole = hidden.new_empty(0) if by_hidden is None else by_hidden.view(hidden.shape)
    return whole, by_matrix, torch.cat([by.flatten() for by in by_matrices])


@adapted_linear_backward.register_fake
def _(
    gradient: Any, hidden: Any, weight: Any, matrix_a: Any, matrices: Any, low: Any, numbers: Any, scalings: Any,
    needs_hidden: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    by_hidden = hidden.new_empty(hidden.shape if needs_hidden else 0)
    by_matrices = matrix_a.new_empty(sum(matrix.numel() for matrix in matrices))
    return by_hidden, matrix_a.new_empty(matrix_a.shape), by_matrices


def _by_update(
    slope: torch.Tensor, low: torch.Tensor, matrices: list[torch.Tensor], layout: Layout
) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """Return the gradients of ``low`` and of each B, from that of the output, ``[T, O]``."""
    if not has_kernels(slope):
        wide = assemble(matrices, slope.shape[1], layout)
        return product(slope, wide, factor(layout)), b_gradients(slope, low, layout)
    update = update_of(low, matrices, layout)
    _, places, *parts = flattened(update, len(update.parts))
    by_low, *found = update_gradients(slope, low, places, parts, layout.heads if layout.fusion == "qkv" else None)
    assert by_low is not None
    by_matrices = [by for by in found if by is not None]
    assert len(by_matrices) == len(matrices)
    return by_low, by_matrices


def _save(ctx: Any, inputs: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, matrices, ctx.numbers, ctx.scalings = inputs
    ctx.save_for_backward(*tensors, output[1], *matrices)


def _differentiate(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple:
    hidden, weight, matrix_a, low, *matrices = ctx.saved_tensors
    needs_hidden = ctx.needs_input_grad[0]
    by_hidden, by_matrix, flat = adapted_linear_backward(
        gradient, hidden, weight, matrix_a, matrices, low, ctx.numbers, ctx.scalings, needs_hidden
    )
    pieces = flat.split([matrix.numel() for matrix in matrices])
    by_matrices = [piece.view(matrix.shape) for piece, matrix in zip(pieces, matrices, strict=True)]
    return by_hidden if needs_hidden else None, None, by_matrix, by_matrices, None, None


adapted_linear.register_autograd(_differentiate, setup_context=_save)
