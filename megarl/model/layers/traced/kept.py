# SPDX-License-Identifier: Apache-2.0
"""Call autograd functions inside an operation that torch.compile does not look into, where autograd does not run."""

from collections.abc import Sequence
from typing import Any

import torch

from megarl.model.layers.updates import Operands
from megarl.parallel.stacks import in_a_row

# Arguments of an autograd function, at most.
ARGUMENTS = 16


class Kept:
    """Stands for the ``ctx`` of an autograd function: what its forward pass keeps for its backward pass.

    Args:
        saved: what the forward pass has saved.
        attributes: what else it has kept.
    """

    needs_input_grad = (True,) * ARGUMENTS

    def __init__(self, *saved: torch.Tensor | None, **attributes: Any) -> None:
        self.saved_tensors = saved
        vars(self).update(attributes)

    def save_for_backward(self, *saved: torch.Tensor | None) -> None:
        """Keep tensors."""
        self.saved_tensors = saved


def as_lists(*linears: Operands) -> tuple[list[torch.Tensor], list[int], list[float]]:
    """Return what ``from_lists`` takes: every B there is, and of each part its first column (-1 for none) and scale."""
    matrices: list[torch.Tensor] = []
    starts: list[int] = []
    scales: list[float] = []
    for linear in linears:
        matrices += linear.matrices
        starts += linear.starts
        scales += linear.scales
    return matrices, starts, scales


def from_lists(
    matrices: Sequence[torch.Tensor], starts: Sequence[int], scales: Sequence[float]
) -> tuple[list[tuple[int, float] | None], list[torch.Tensor | None]]:
    """Return the places of an update's parts and their matrices, as ``updates.flattened`` does."""
    left = iter(matrices)
    places = [None if start < 0 else (start, scale) for start, scale in zip(starts, scales, strict=True)]
    return places, [None if place is None else next(left) for place in places]


def cut(items: Sequence[Any], *counts: int) -> list[Sequence[Any]]:
    """Return the first so many items, the next so many, and so on; last those that are left."""
    groups = []
    for count in counts:
        groups.append(items[:count])
        items = items[count:]
    return [*groups, items]


def joined(gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Return the gradients of matrices one after the other, flat: an operation's results share no memory.

    They are not copied if they lie so.
    """
    there = [gradient for gradient in gradients if gradient is not None]
    if in_a_row(there):
        return there[0].as_strided((sum(gradient.numel() for gradient in there),), (1,))
    return torch.cat([gradient.flatten() for gradient in there])


def parted(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return what ``joined`` has joined, shaped like these matrices; torch.compile can trace it."""
    pieces = flat.split_with_sizes([matrix.numel() for matrix in like])
    return [piece.view(matrix.shape) for piece, matrix in zip(pieces, like, strict=True)]


def rows_of(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the rows of each of these matrices, which lie one below the other; torch.compile can trace it."""
    return list(flat.split_with_sizes([matrix.shape[0] for matrix in like]))


def unversioned(room: torch.Tensor | None) -> torch.Tensor | None:
    """Return a room whose changes autograd does not count: nothing that it saved is changed by them."""
    return None if room is None else room.data
