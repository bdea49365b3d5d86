# SPDX-License-Identifier: Apache-2.0
"""A frozen linear with its adapter as one operator, for code that torch.compile traces.

The compiler would write each product to memory of its own and copy the wide ones once more to add them. Inside this
operator the adapter's products are added in place, forward and backward, as ``products`` does without a compiler.

Shapes: T tokens, I inputs, O outputs on this rank, R sum of the parts' ranks.
"""

from typing import Any

import torch


@torch.library.custom_op("megarl::adapted_linear", mutates_args=())
def adapted_linear(
    hidden: torch.Tensor, weight: torch.Tensor, matrix_a: torch.Tensor, wide: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``hidden @ weight.T + scale * (hidden @ matrix_a.T) @ wide.T``.

    Args:
        hidden: ``[T, 1, I]``.
        weight: the base's, ``[O, I]``; gets no gradient.
        matrix_a: every part's A, ``[R, I]``.
        wide: every part's B at its rows and columns, ``[O, R]``.
        scale: factor of the update.

    Returns:
        The output ``[T, 1, O]``, and ``hidden @ matrix_a.T`` ``[T, R]`` for the backward pass.
    """
    rows = hidden.reshape(-1, hidden.shape[-1])
    low, out = rows @ matrix_a.t(), rows @ weight.t()
    out.addmm_(low, wide.t(), alpha=scale)
    return out.view(*hidden.shape[:-1], len(weight)), low


@adapted_linear.register_fake
def _(hidden: Any, weight: Any, matrix_a: Any, wide: Any, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    out = hidden.new_empty(*hidden.shape[:-1], weight.shape[0])
    # Not Size.numel(), which would make a constant of T.
    return out, hidden.new_empty(hidden.shape[0] * hidden.shape[1], matrix_a.shape[0])


@torch.library.custom_op("megarl::adapted_linear_backward", mutates_args=())
def adapted_linear_backward(
    gradient: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    matrix_a: torch.Tensor,
    wide: torch.Tensor,
    low: torch.Tensor,
    scale: float,
    needs_hidden: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of ``hidden`` (no elements unless ``needs_hidden``), ``matrix_a`` and ``wide``."""
    slope, rows = gradient.reshape(-1, gradient.shape[-1]), hidden.reshape(-1, hidden.shape[-1])
    by_low = _scaled(slope, wide, scale)
    by_matrix, by_wide = by_low.t() @ rows, _scaled(slope.t(), low, scale)
    if not needs_hidden:
        return hidden.new_empty(0), by_matrix, by_wide
    by_hidden = slope @ weight
    by_hidden.addmm_(by_low, matrix_a)
    return by_hidden.view(hidden.shape), by_matrix, by_wide


@adapted_linear_backward.register_fake
def _(
    gradient: Any, hidden: Any, weight: Any, matrix_a: Any, wide: Any, low: Any, scale: float, needs_hidden: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    by_hidden = hidden.new_empty(hidden.shape if needs_hidden else 0)
    return by_hidden, matrix_a.new_empty(matrix_a.shape), wide.new_empty(wide.shape)


def _scaled(left: torch.Tensor, right: torch.Tensor, scale: float) -> torch.Tensor:
    """Return ``scale * left @ right``, scaled before it is rounded."""
    return torch.addmm(right.new_empty(()), left, right, beta=0, alpha=scale)


def _save(ctx: Any, inputs: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, output[1])


def _differentiate(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple:
    needs_hidden = ctx.needs_input_grad[0]
    by_hidden, by_matrix, by_wide = adapted_linear_backward(gradient, *ctx.saved_tensors, ctx.scale, needs_hidden)
    return by_hidden if needs_hidden else None, None, by_matrix, by_wide, None


adapted_linear.register_autograd(_differentiate, setup_context=_save)
