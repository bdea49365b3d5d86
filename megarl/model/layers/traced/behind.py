# SPDX-License-Identifier: Apache-2.0
"""Compute what is behind attention by one operation: its projection, the residual stream, norm and gated MLP.

Each linear has an adapter. It calls the kernels that uncompiled layers use, in the same order.

Shapes: T tokens, H hidden size, E inputs of attention's projection, I features of the gate, r rank of a part; P, S and
U ranks of the adapters of the projection, of gate and up together, and of the last linear.
"""

from typing import Any

import torch
import torch.nn.functional as F

from megarl.model.layers.kernels.adapted_norm import AddAndNorm
from megarl.model.layers.kernels.adapted_swiglu import AdaptedSwiGLU
from megarl.model.layers.kernels.residual import AddAdapted
from megarl.model.layers.kernels.rows import as_rows
from megarl.model.layers.kernels.through_gradients import through_gradients
from megarl.model.layers.traced.kept import Kept, cut, from_lists, joined, parted, rows_of, unversioned
from megarl.model.layers.traced.operators import operator
from megarl.model.layers.updates import input_gradient, with_room
from megarl.parallel import stacks

Seven = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]  # fmt: skip


@operator("behind_attention")
def behind_attention(
    out: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, weights: list[torch.Tensor],
    matrices_a: list[torch.Tensor], matrices: list[torch.Tensor], room: torch.Tensor | None,
    room_gated: torch.Tensor | None, counts: list[int], starts: list[int], scales: list[float], eps: float,
) -> Seven:  # fmt: skip
    """Return the layer's output of what attention has returned, and what the backward pass reads.

    Args:
        out: attention's, ``[T, 1, E]``, 16-bit.
        residual: the residual stream, ``[T, 1, H]``.
        norm: frozen weight of the norm in front of the MLP, ``[H]``.
        weights: frozen weights of attention's projection ``[H, E]``, of gate and up ``[2 I, H]``, and of the last
            linear ``[H, I]``.
        matrices_a: every A of each of these, with P rows of E, S of H and U of I.
        matrices: B of each part that has one, ``[outputs of the part, r]``: projection, gate, up, last linear.
        room, room_gated: ``updates.Operands.room`` of the first two.
        counts: A's of each of the linears.
        starts, scales: of ``kept.as_lists``, for those four parts.
        eps: of the norm.

    Returns:
        The output ``[T, 1, H]``; of the projection the product with A ``[T, P]``; the sum in front of the norm
        ``[T, H]``, and ``1 / root`` of its rows, float32 ``[T]``; of gate and up the product with A ``[T, S]`` and with
        the weight ``[T, 2 I]``; of the last linear the product with A ``[T, U]``.
    """
    places, parts = from_lists(matrices, starts, scales)
    rows, stacked = as_rows(out), _stacked(matrices_a, counts)
    kept, low = Kept(), F.linear(rows, stacked[0])
    projected = F.linear(rows, weights[0])
    normed, low_gated, total = AddAndNorm.forward(
        kept, as_rows(residual), projected, norm, eps, stacked[1], low, places[:1], parts[0]
    )
    fused = F.linear(normed, weights[1])
    active, low_last = AdaptedSwiGLU.forward(Kept(), fused, stacked[2], low_gated, places[1:3], *parts[1:3])
    last = F.linear(active, weights[2])
    output = AddAdapted.forward(Kept(), total, last, low_last, places[3:], parts[3])
    return output.view(residual.shape), low, total, kept.saved_tensors[2], low_gated, fused, low_last


@behind_attention.register_fake
def _(
    out: Any, residual: Any, norm: Any, weights: Any, matrices_a: Any, matrices: Any, room: Any, room_gated: Any,
    counts: Any, *others: Any,
) -> Seven:  # fmt: skip
    tokens = out.shape[0] * out.shape[1]
    lows = [out.new_empty(tokens, stacks.rows_in(group)) for group in cut(matrices_a, *counts[:2])]
    output, total = residual.new_empty(residual.shape), residual.new_empty(tokens, residual.shape[-1])
    inverse = out.new_empty(tokens, dtype=torch.float32)
    return output, lows[0], total, inverse, lows[1], out.new_empty(tokens, weights[1].shape[0]), lows[2]


@operator("behind_attention_backward")
def behind_attention_backward(
    by_output: torch.Tensor, out: torch.Tensor, norm: torch.Tensor, weights: list[torch.Tensor],
    matrices_a: list[torch.Tensor], matrices: list[torch.Tensor], kept: list[torch.Tensor], room: torch.Tensor | None,
    room_gated: torch.Tensor | None, counts: list[int], starts: list[int], scales: list[float],
) -> Seven:  # fmt: skip
    """Return gradients; ``kept`` is what ``behind_attention`` returns behind its output.

    They are those of ``out``, ``residual``, every A of the first linear and of the second, the first and the last of
    ``matrices``; and of the other ``matrices`` and every A of the last linear, flat, as one kernel writes them.
    """
    stacked = _stacked(matrices_a, counts)
    places, parts = from_lists(matrices, starts, scales)
    low, total, inverse, low_gated, fused, low_last = kept
    by_rows = as_rows(by_output)

    context = Kept(low_last, parts[3], places=places[3:])
    _, _, by_low, _, by_last = AddAdapted.backward(context, by_rows)
    by_active = by_rows @ weights[2]
    context = Kept(fused, stacked[2], low_gated, *parts[1:3], places=places[1:3])
    by_fused, by_a_last, by_low, _, *by_gated = AdaptedSwiGLU.backward(context, by_active, by_low)

    by_normed = input_gradient(by_fused, by_low, weights[1], stacked[1], unversioned(room_gated))
    context = Kept(total, norm, inverse, stacked[1], low, parts[0], places=places[:1])
    by_total, _, _, _, by_a_gated, by_low, _, by_first = AddAndNorm.backward(context, by_normed, by_low, by_rows)

    by_out = input_gradient(by_total, by_low, weights[0], stacked[0], unversioned(room)).view(out.shape)
    by_a = through_gradients(None, by_low, out, stacked[0])
    by_residual = by_total.unsqueeze(1)
    return by_out, by_residual, by_a, by_a_gated, by_first, by_last, joined([*by_gated, by_a_last])


@behind_attention_backward.register_fake
def _(
    by_output: Any, out: Any, norm: Any, weights: Any, matrices_a: Any, matrices: Any, kept: Any, room: Any,
    room_gated: Any, counts: Any, *others: Any,
) -> Seven:  # fmt: skip
    first, gated, last = cut(matrices_a, *counts[:2])
    by_a, by_a_gated = (group[0].new_empty(stacks.rows_in(group), group[0].shape[1]) for group in (first, gated))
    by_residual, _ = with_room(by_output, len(by_a))
    by_first, by_last = torch.empty_like(matrices[0]), torch.empty_like(matrices[-1])
    flat = out.new_empty(sum(one.numel() for one in (*matrices[1:-1], *last)))
    return out.new_empty(out.shape), by_residual, by_a, by_a_gated, by_first, by_last, flat


def _save(ctx: Any, inputs: tuple, output: Seven) -> None:
    out, _, norm, weights, matrices_a, matrices, *ctx.settings, _ = inputs
    ctx.counts = 6, len(weights), len(matrices_a)
    ctx.save_for_backward(out, norm, *output[1:], *weights, *matrices_a, *matrices)
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx: Any, by_output: torch.Tensor, *_: Any) -> tuple:
    out, norm, *saved = ctx.saved_tensors
    kept, weights, matrices_a, matrices = cut(saved, *ctx.counts)
    by_out, by_residual, by_a, by_a_gated, by_first, by_last, flat = behind_attention_backward.called_by(ctx)(
        by_output, out, norm, weights, matrices_a, matrices, kept, *ctx.settings
    )
    first, gated, last = cut(matrices_a, *ctx.settings[2][:2])
    by_gated, by_a_last = cut(parted(flat, [*matrices[1:-1], *last]), len(matrices) - 2)
    by_matrices_a = [*rows_of(by_a, first), *rows_of(by_a_gated, gated), *by_a_last]
    by_matrices, frozen = [by_first, *by_gated, by_last], [None] * len(weights)
    return by_out, by_residual, None, frozen, by_matrices_a, by_matrices, *[None] * 6


def _stacked(matrices_a: list[torch.Tensor], counts: list[int]) -> list[torch.Tensor]:
    """Return every A of each linear, one below the other."""
    return [stacks.joined(group) for group in cut(matrices_a, *counts[:2])]


behind_attention.register_autograd(_differentiate, setup_context=_save)
