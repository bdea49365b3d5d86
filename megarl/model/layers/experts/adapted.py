# SPDX-License-Identifier: Apache-2.0
"""Compute the same linear of all experts with its adapters, whose wide products a kernel adds where they belong.

These are the updates of the output, and what comes back through A in the gradient of the tokens.

Shapes: T tokens sorted by expert, E experts, I inputs, O outputs, P parts of the output, R sum of the ranks, r a
part's rank. Import this module only where Triton is installed.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from megarl.model.layers.experts.grouped import PartOfAll, grouped_product
from megarl.model.layers.kernels.grouped_updates import MOST, add_grouped


def takes(weights: torch.Tensor, matrices_a: torch.Tensor) -> bool:
    """Return True if ``adapted_product`` is for these: frozen weights, a rank that is not too high."""
    return not weights.requires_grad and matrices_a.shape[1] <= MOST


def adapted_product(
    tokens: torch.Tensor,
    weights: torch.Tensor,
    matrices_a: torch.Tensor,
    parts: Sequence[PartOfAll],
    count: int,
    ends: torch.Tensor,
) -> torch.Tensor:
    """Map the tokens of all experts ``[T, I]`` to ``[T, O]``.

    Args:
        tokens: 16-bit.
        weights: the base's, ``[E, O, I]``; they get no gradient.
        matrices_a: every A, ``[E, R, I]``.
        parts: what is added.
        count: P; the parts are equally wide.
        ends: int32 ``[E]``, the row after the last one of each expert.
    """
    out, low = _Lowered.apply(tokens, weights, matrices_a, ends)
    places = tuple((part.place, part.start, part.scale) for part in parts)
    return _Raised.apply(out, low, ends, count, places, *(part.matrices for part in parts))


class _Lowered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, weights: torch.Tensor, matrices_a: torch.Tensor, ends: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens' products with the weights and with A."""
        ctx.save_for_backward(tokens, weights, matrices_a, ends)
        return grouped_product(tokens, weights, ends), grouped_product(tokens, matrices_a, ends)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradients of the tokens ``[T, I]`` and of A ``[E, R, I]``."""
        tokens, weights, matrices_a, ends = ctx.saved_tensors
        by_out, by_low = gradients
        by_tokens = None
        if ctx.needs_input_grad[0]:
            by_tokens = F.grouped_mm(by_out, weights, offs=ends)
            add_grouped(by_tokens, by_low, matrices_a, ends, 1.0, along=1)
        return by_tokens, None, F.grouped_mm(by_low.t(), tokens, offs=ends), None


class _Raised(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        out: torch.Tensor,
        low: torch.Tensor,
        ends: torch.Tensor,
        count: int,
        places: tuple[tuple[int, int, float], ...],
        *matrices: torch.Tensor,
    ) -> torch.Tensor:
        """Add each part's update to ``out``, in its memory."""
        ctx.save_for_backward(low, ends, *matrices)
        ctx.count, ctx.places = count, places
        total = out.detach()
        pieces = total.chunk(count, dim=-1)
        for (place, start, scale), matrix in zip(places, matrices, strict=True):
            add_grouped(pieces[place], low[:, start : start + matrix.shape[2]], matrix, ends, scale, along=2)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradients of ``out [T, O]``, ``low [T, R]`` and each B ``[E, O / P, r]``."""
        low, ends, *matrices = ctx.saved_tensors
        by_low, by_matrices = torch.zeros_like(low), []
        pieces = gradients[0].chunk(ctx.count, dim=-1)
        for (place, start, scale), matrix in zip(ctx.places, matrices, strict=True):
            piece, columns = pieces[place], slice(start, start + matrix.shape[2])
            by_low[:, columns].add_(F.grouped_mm(piece, matrix, offs=ends), alpha=scale)
            by_matrices.append(F.grouped_mm(piece.t(), low[:, columns] * scale, offs=ends))
        return gradients[0], by_low, None, None, None, *by_matrices
