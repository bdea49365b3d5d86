# SPDX-License-Identifier: Apache-2.0
"""Keep matrices of several modules in one piece of memory, so that no pass has to stack them.

The optimizer places them (``model/optimizer/flat_part``), the layers read them (``model/layers/experts/stacks``). Each
parameter is a view.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

# One list per expert: the matrices that one product reads, whose rows follow each other.
Groups = Sequence[Sequence[torch.nn.Parameter]]
# Attributes of a parameter by which its gradient is added where it lies, without autograd.
STOOD_FOR = "expert_stack", "main_grad", "reduced_early"


@dataclass(frozen=True)
class Stack:
    """Matrices that lie one after the other.

    Attributes:
        weights: ``[E, rows, columns]``; no copy.
        gradients: their ``main_grad``, float32, alike.
    """

    weights: torch.Tensor
    gradients: torch.Tensor


def place(groups: Groups) -> None:
    """Note that the matrices, and their ``main_grad``, lie one after the other in the order of ``groups``."""
    first = groups[0][0]
    rows, columns = sum(len(matrix) for matrix in groups[0]), first.shape[1]
    size, stride = (len(groups), rows, columns), (rows * columns, columns, 1)
    first.expert_stack = Stack(first.data.as_strided(size, stride), first.main_grad.as_strided(size, stride))


def stack_of(first: torch.nn.Parameter, experts: int) -> Stack | None:
    """Return the stack that begins with a matrix, if that is still where it was placed."""
    stack = getattr(first, "expert_stack", None)
    if stack is None or has_hook(first) or len(stack.weights) != experts:
        return None
    moved = stack.weights.data_ptr() != first.data_ptr() or stack.gradients.data_ptr() != first.main_grad.data_ptr()
    return None if moved else stack


def alias(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return a leaf of autograd's in a parameter's memory, which stands for the parameter wherever stacks are read."""
    leaf = parameter.detach().requires_grad_()
    for name in STOOD_FOR:
        if hasattr(parameter, name):
            setattr(leaf, name, getattr(parameter, name))
    return leaf


def joined(matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return matrices of equal width one below the other: a view if they lie so in memory, else a copy."""
    if len(matrices) == 1:
        return matrices[0]
    if torch.compiler.is_compiling() or not in_a_row(matrices):
        return torch.cat(list(matrices))
    return _Joined.apply(*matrices) if torch.is_grad_enabled() else _view_of(matrices)


def rows_in(matrices: Sequence[torch.Tensor]) -> int:
    """Return the number of rows of all these matrices."""
    return sum(matrix.shape[0] for matrix in matrices)


def in_a_row(matrices: Sequence[torch.Tensor]) -> bool:
    """Return True if each matrix begins where the one before ends, in one piece of memory."""
    return all(_follows(*pair) for pair in pairwise(matrices))


def _follows(before: torch.Tensor, after: torch.Tensor) -> bool:
    same = before.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()
    contiguous = before.is_contiguous() and after.is_contiguous()
    return same and contiguous and before.data_ptr() + before.nbytes == after.data_ptr()


def _view_of(matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    first = matrices[0].detach()
    return first.as_strided((rows_in(matrices), first.shape[1]), first.stride())


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.rows = [len(first), *map(len, others)]
        return _view_of([first, *others])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return views of the gradient."""
        return gradients[0].split(ctx.rows)


def has_hook(parameter: torch.nn.Parameter) -> bool:
    """Return True if a parameter's gradient must go through autograd: to mcore's hook, or to ``grad`` without DDP."""
    return getattr(parameter, "reduced_early", True)
