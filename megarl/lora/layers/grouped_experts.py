# SPDX-License-Identifier: Apache-2.0
"""Compute the adapters of all experts of a rank together.

Shapes: T tokens sorted by expert, E experts, I inputs, O outputs, R sum of the parts' ranks, r a part's rank.
"""

from collections.abc import Sequence
from typing import Any

import torch

from megarl.lora.layers.matrices import AdapterMatrices
from megarl.model.layers.experts.grouped import ALIGNED, NotTogether, PartOfAll, grouped_product
from megarl.model.layers.experts.stacks import stacked
from megarl.model.layers.pointwise import wants_kernels
from megarl.parallel.stacks import Groups


class GroupedAdapters:
    """The adapters of all experts in the same linear.

    Attributes:
        adapters: one per expert.
        stacks: the matrices that one product reads, of each expert: first every A, then B part by part.
    """

    def __init__(self, adapters: Sequence[AdapterMatrices]) -> None:
        """Check that they can be computed together.

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
        self.adapters = list(adapters)
        own = [key for key in one.keys if key in one.lora_A]
        self.stacks: list[Groups] = [
            [[adapter.lora_A[key] for key in own] for adapter in adapters],
            *([[adapter.lora_B[key]] for adapter in adapters] for key in one.keys),
        ]

    def is_of(self, first: AdapterMatrices, last: AdapterMatrices) -> bool:
        """Return True if these are the first and the last expert's adapter, with the same parameters as at first."""
        key, held = first.keys[0], self.stacks[1]
        same = self.adapters[0] is first and self.adapters[-1] is last
        return same and held[0][0] is first.lora_B[key] and held[-1][0] is last.lora_B[key]

    def __call__(self, weights: torch.Tensor, tokens: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Map ``tokens [T, I]`` by the experts' weights ``[E, O, I]`` and the adapters to ``[T, O]``."""
        one = self.adapters[0]
        if one.lora_A._forward_pre_hooks:  # mcore's, which all have or none
            for adapter in self.adapters:
                adapter.wait()
        matrices_a, *matrices_b = (stacked(matrices) for matrices in self.stacks)
        each = zip(one.places, one.starts, one.scalings, matrices_b, strict=True)
        parts = [PartOfAll(*part) for part in each]
        if wants_kernels(tokens):
            from megarl.model.layers.experts import adapted  # here, since Triton may not be installed

            if adapted.takes(weights, matrices_a):
                return adapted.adapted_product(tokens, weights, matrices_a, parts, len(one.parts), ends)
        out, low = grouped_product(tokens, weights, ends), grouped_product(tokens, matrices_a, ends)
        deltas = [
            grouped_product(low[:, part.start :][:, : part.matrices.shape[2]] * part.scale, part.matrices, ends)
            for part in parts
        ]
        return _AddParts.apply(out, len(one.parts), one.places, *deltas)


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
