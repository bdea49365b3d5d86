# SPDX-License-Identifier: Apache-2.0
"""Compute the adapters of all experts of a rank together.

Shapes: T tokens sorted by expert, E experts, I inputs, O outputs, R sum of the parts' ranks, r a part's rank.
"""

from collections.abc import Sequence
from typing import Any

import torch

from megarl.lora.layers.matrices import AdapterMatrices
from megarl.model.layers.experts.grouped import ALIGNED, Adapt, NotTogether, grouped_product, stacked


def adapters_together(adapters: Sequence[AdapterMatrices]) -> Adapt:
    """Return what adds the adapters' part to ``out [T, O]``, from ``tokens [T, I]``.

    Args:
        adapters: one per expert, of the same linear, whole (not split over ranks).

    Raises:
        NotTogether: their ranks, scalings or parts differ, or a rank's rows are no whole vectors.
    """
    one = adapters[0]
    if any((it.keys, it.ranks, it.scalings) != (one.keys, one.ranks, one.scalings) for it in adapters):
        raise NotTogether
    size = one.lora_B[one.keys[0]].itemsize
    if any(rank * size % ALIGNED for rank in one.ranks):
        raise NotTogether

    def adapt(out: torch.Tensor, tokens: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        for adapter in adapters:
            adapter.wait()
        low = grouped_product(tokens, _matrices_a(adapters), ends)
        deltas = []
        for key, start, rank, scaling in zip(one.keys, one.starts, one.ranks, one.scalings, strict=True):
            matrices = stacked([adapter.lora_B[key] for adapter in adapters])
            deltas.append(grouped_product(low[:, start : start + rank] * scaling, matrices, ends))
        return _AddParts.apply(out, len(one.parts), one.places, *deltas)

    return adapt


def _matrices_a(adapters: Sequence[AdapterMatrices]) -> torch.Tensor:
    """Return every A, ``[E, R, I]``."""
    keys = [key for key in adapters[0].keys if key in adapters[0].lora_A]
    sides = [stacked([adapter.lora_A[key] for adapter in adapters]) for key in keys]
    return sides[0] if len(sides) == 1 else torch.cat(sides, dim=1)


class _AddParts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, out: torch.Tensor, count: int, places: tuple[int, ...], *deltas: torch.Tensor
    ) -> torch.Tensor:
        """Add each delta ``[T, O / count]`` at its place in ``out [T, O]``, in its memory."""
        ctx.count, ctx.places = count, places
        total = out.detach()
        parts = total.chunk(count, dim=-1)
        for place, delta in zip(places, deltas, strict=True):
            parts[place].add_(delta)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        parts = gradients[0].chunk(ctx.count, dim=-1)
        return gradients[0], None, None, *(parts[place] for place in ctx.places)
