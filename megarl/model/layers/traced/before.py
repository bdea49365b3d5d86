# SPDX-License-Identifier: Apache-2.0
"""Compute what is before attention by one operation: norm, projection of q, k and v, norms of heads, RoPE.

The projection has an adapter. It calls the kernels that uncompiled layers use, in the same order.

Shapes: T tokens, H hidden size, O outputs of the projection, R sum of its ranks, r a part's rank, D head_dim.
"""

from typing import Any

import torch
import torch.nn.functional as F

from megarl.model.layers.kernels.adapted_heads import AdaptedHeads
from megarl.model.layers.kernels.adapted_norm import ProjectedNorm
from megarl.model.layers.kernels.heads import empty_parts
from megarl.model.layers.kernels.rows import as_rows
from megarl.model.layers.kernels.through_gradients import through_gradients
from megarl.model.layers.traced.kept import Kept, cut, from_lists, joined, parted, rows_of, unversioned
from megarl.model.layers.traced.operators import operator
from megarl.model.layers.updates import input_gradient
from megarl.model.weights.fusion import HeadLayout
from megarl.parallel import stacks

Six = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@operator("before_attention")
def before_attention(
    hidden: torch.Tensor, angles: torch.Tensor, weight: torch.Tensor, matrices_a: list[torch.Tensor],
    matrices: list[torch.Tensor], room: torch.Tensor | None, norms: list[torch.Tensor], starts: list[int],
    scales: list[float], eps: list[float], layout: list[int],
) -> Six:  # fmt: skip
    """Return queries, keys and values of hidden states, and what the backward pass reads.

    Args:
        hidden: ``[T, 1, H]``, 16-bit.
        angles: ``[T, 1, 1, D]`` float32, radians.
        weight, matrices_a, room: of the projection; see ``updates.Operands``. The weight gets no gradient.
        matrices: B of each part that has one, ``[O of the part, r]``.
        norms: frozen weights of the norm of hidden states, and of queries and keys if there are such.
        starts, scales: of ``kept.as_lists``, for queries, keys and values.
        eps: of the norm of hidden states, and of those of heads.
        layout: G, N and D of ``heads.HeadLayout``.

    Returns:
        Queries, keys and values, ``[T, 1, heads, D]``; ``1 / root`` of the norm's rows, float32 ``[T]``; the projection
        with the updates of queries and keys, ``[T, O]``; the norm's product with A, ``[T, R]``.
    """
    inner, outer, heads = Kept(), Kept(), HeadLayout(*layout)
    places, parts = from_lists(matrices, starts, scales)
    normed, low, _ = ProjectedNorm.forward(inner, as_rows(hidden), norms[0], eps[0], stacks.joined(matrices_a))
    fused = F.linear(normed, weight)
    query, key, value = (
        part.unsqueeze(1)
        for part in AdaptedHeads.forward(outer, fused, angles, tuple(norms[1:]), eps[1], heads, low, places, *parts)
    )
    return query, key, value, inner.saved_tensors[2], outer.saved_tensors[0], low


@before_attention.register_fake
def _(
    hidden: Any, angles: Any, weight: Any, matrices_a: Any, matrices: Any, room: Any, norms: Any, starts: Any,
    scales: Any, eps: Any, layout: Any,
) -> Six:  # fmt: skip
    tokens = hidden.shape[0] * hidden.shape[1]
    fused, low = hidden.new_empty(tokens, weight.shape[0]), hidden.new_empty(tokens, stacks.rows_in(matrices_a))
    query, key, value = (part.unsqueeze(1) for part in empty_parts(fused, HeadLayout(*layout)))
    return query, key, value, hidden.new_empty(tokens, dtype=torch.float32), fused, low


@operator("before_attention_backward")
def before_attention_backward(
    by_query: torch.Tensor, by_key: torch.Tensor, by_value: torch.Tensor, hidden: torch.Tensor, angles: torch.Tensor,
    weight: torch.Tensor, matrices_a: list[torch.Tensor], matrices: list[torch.Tensor], room: torch.Tensor | None,
    norms: list[torch.Tensor], inverse: torch.Tensor, fused: torch.Tensor, low: torch.Tensor, starts: list[int],
    scales: list[float], eps: list[float], layout: list[int], by_residual: torch.Tensor | None, needs_hidden: bool,
) -> Three:  # fmt: skip
    """Return the gradients of ``hidden`` (no elements unless ``needs_hidden``), of every A, and of every B, flat.

    ``by_residual`` is the gradient of ``hidden`` by what reads it behind the operation; None if autograd adds it.
    """
    (places, parts), matrix_a = from_lists(matrices, starts, scales), stacks.joined(matrices_a)
    kept = Kept(fused, angles, low, *parts, *norms[1:], settings=(eps[1], HeadLayout(*layout)), places=places)
    by_fused, _, _, _, _, by_low, _, *by_matrices = AdaptedHeads.backward(kept, by_query, by_key, by_value)
    if not needs_hidden:
        by_a = through_gradients(None, by_low, hidden, matrix_a, (inverse, norms[0]))
        return hidden.new_empty(0), by_a, joined(by_matrices)
    by_normed = input_gradient(by_fused, by_low, weight, matrix_a, unversioned(room))
    kept = Kept(as_rows(hidden), norms[0], inverse, matrix_a)
    by_hidden, _, _, by_a = ProjectedNorm.backward(kept, by_normed, by_low, by_residual)
    return by_hidden.view(hidden.shape), by_a, joined(by_matrices)


@before_attention_backward.register_fake
def _(
    by_query: Any, by_key: Any, by_value: Any, hidden: Any, angles: Any, weight: Any, matrices_a: Any, matrices: Any,
    *others: Any,
) -> Three:  # fmt: skip
    flat, needs_hidden = hidden.new_empty(sum(matrix.numel() for matrix in matrices)), others[-1]
    by_a = hidden.new_empty(stacks.rows_in(matrices_a), hidden.shape[-1])
    return hidden.new_empty(hidden.shape if needs_hidden else 0), by_a, flat


def _save(ctx: Any, inputs: tuple, output: Six) -> None:
    hidden, angles, weight, matrices_a, matrices, ctx.room, norms, *ctx.settings = inputs
    ctx.counts = len(matrices_a), len(matrices)
    ctx.save_for_backward(hidden, angles, weight, *output[3:], *matrices_a, *matrices, *norms)
    ctx.mark_non_differentiable(*output[3:])


def _differentiate(ctx: Any, by_query: torch.Tensor, by_key: torch.Tensor, by_value: torch.Tensor, *by: Any) -> tuple:
    hidden, angles, weight, inverse, fused, low, *lists = ctx.saved_tensors
    (matrices_a, matrices, norms), needs_hidden = cut(lists, *ctx.counts), ctx.needs_input_grad[0]
    by_residual = by[3] if len(by) > 3 else None  # by[:3] are of what the backward pass reads
    by_hidden, by_a, flat = before_attention_backward.called_by(ctx)(
        by_query, by_key, by_value, hidden, angles, weight, matrices_a, matrices, ctx.room, norms, inverse, fused, low,
        *ctx.settings, by_residual, needs_hidden,
    )  # fmt: skip
    by_hidden, by_matrices_a = by_hidden if needs_hidden else None, rows_of(by_a, matrices_a)
    by_matrices = parted(flat, matrices)
    return by_hidden, None, None, by_matrices_a, by_matrices, None, [None] * len(norms), None, None, None, None


before_attention.register_autograd(_differentiate, setup_context=_save, passes=0)
