# SPDX-License-Identifier: Apache-2.0
"""Compute a rank's experts together, by products that are grouped by expert.

One product per linear takes the place of one per expert, whose launches take far longer than the work: at 128 experts a
step is the host's. The experts stay modules of their own, with their own parameters and adapters.

Shapes: T tokens of all experts, sorted by expert; E experts of this rank; I inputs and O outputs of a linear; F its
features after SwiGLU.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from megarl.model.layers.experts.stacks import stacked
from megarl.model.layers.pointwise import swiglu, wants_kernels
from megarl.parallel.stacks import has_hook

Adapt = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class NotTogether(Exception):
    """The adapters of several experts cannot be computed together."""


class PartOfAll(NamedTuple):
    """The adapters of one part of the output, of all experts.

    Attributes:
        place: of the part among the output's P.
        start: first of its columns of the tokens' products with every A. Parts may share columns.
        scale: factor of the product.
        matrices: B, ``[E, O / P, r]``.
    """

    place: int
    start: int
    scale: float
    matrices: torch.Tensor


# Bytes that each row of what a grouped product reads must be a multiple of.
ALIGNED = 16
# The GPUs whose kernel for grouped products is tested (tests/gpu/test_grouped_experts.py), by compute capability.
HOPPER = 9


def place_together(linears: Sequence[torch.nn.Module]) -> None:
    """Move the linears' weights into one tensor; each parameter becomes a view of it.

    Args:
        linears: the same linear of each expert, with ``weight [O, I]``.
    """
    together = torch.stack([linear.weight.data for linear in linears])
    for linear, weight in zip(linears, together, strict=True):
        linear.weight.data = weight


def weights_together(linears: Sequence[torch.nn.Module]) -> torch.Tensor | None:
    """Return the weights of all experts, ``[E, O, I]``; None if they do not lie one after the other.

    None also if they are trained and mcore waits for each one's hooks.
    """
    first, last = linears[0].weight, linears[-1].weight
    if last.data_ptr() - first.data_ptr() != (len(linears) - 1) * first.numel() * first.itemsize:
        return None
    if first.untyped_storage().data_ptr() != last.untyped_storage().data_ptr():
        return None
    view = first.data.as_strided((len(linears), *first.shape), (first.numel(), *first.stride()))
    if not (first.requires_grad and torch.is_grad_enabled()):
        return view
    if has_hook(first) or linears[0]._forward_pre_hooks:
        return None
    return stacked([[linear.weight] for linear in linears])


def wants_groups(tokens: torch.Tensor, inner: int) -> bool:
    """Return True if grouped products are exact enough, and one kernel: 16 bits, on Hopper, rows of whole vectors.

    On other GPUs torch multiplies expert by expert, and the host waits; or, on Blackwell, it has not been tried.

    Args:
        tokens: ``[T, H]``.
        inner: F.
    """
    aligned = all(width * tokens.itemsize % ALIGNED == 0 for width in (tokens.shape[1], inner))
    return tokens.is_cuda and tokens.itemsize == 2 and len(tokens) > 0 and aligned and _is_hopper(tokens.device)


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == HOPPER


def grouped_product(tokens: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply each expert's tokens by the transpose of its matrix: ``[T, I], [E, O, I] -> [T, O]``.

    Args:
        tokens: sorted by expert.
        matrices: one per expert.
        ends: int32 ``[E]``, the row after the last one of each expert.
    """
    return F.grouped_mm(tokens, matrices.transpose(1, 2), offs=ends)


class GroupedLinear:
    """The same linear of every expert, with or without adapters.

    Args:
        weights: ``[E, O, I]``.
        adapt: maps (weights, tokens ``[T, I]``, ends) to ``[T, O]``, with the adapters; None if there are none.
    """

    def __init__(self, weights: torch.Tensor, adapt: Adapt | None) -> None:
        self._weights, self._adapt = weights, adapt

    @classmethod
    def of(cls, linears: Sequence[torch.nn.Module]) -> "GroupedLinear | None":
        """Return the grouped linear; None if the experts' linears, or their adapters, differ too much for it.

        A linear with an adapter offers ``together``, which takes the linears of all experts and returns ``adapt``,
        None if no adapter is active, or raises ``NotTogether``.
        """
        if len({type(linear) for linear in linears}) > 1 or getattr(linears[0], "bias", None) is not None:
            return None
        if any(linear._forward_hooks for linear in linears):  # which would not be called
            return None
        weights = weights_together(linears)
        if weights is None:
            return None
        try:
            together = getattr(type(linears[0]), "together", None)
            return cls(weights, together(linears) if together else None)
        except NotTogether:
            return None

    def __call__(self, tokens: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Map ``[T, I]`` to ``[T, O]``; ``ends`` as for ``grouped_product``."""
        adapt = self._adapt
        return grouped_product(tokens, self._weights, ends) if adapt is None else adapt(self._weights, tokens, ends)


def weighted_swiglu(gate_and_up: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``[T, 2 F], [T] -> [T, F]``: SwiGLU (Shazeer, arXiv:2002.05202), times each token's routing weight."""
    if not wants_kernels(gate_and_up):
        return (swiglu(gate_and_up) * weights.unsqueeze(-1)).to(gate_and_up.dtype)
    from megarl.model.layers.kernels import weighted_swiglu as kernel

    return kernel.weighted_swiglu(gate_and_up, weights)
