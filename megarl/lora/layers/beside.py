# SPDX-License-Identifier: Apache-2.0
"""A frozen linear beside an adapter's A: one product forms the gradient of the input that both have.

What comes through A is a narrow product more, ``by_low @ A``. As a product of its own it reads and writes the wide
gradient once more. Here the rows of A are copied behind those of the weight, and the kernel that forms the gradient of
the output writes that of ``low`` behind each of its rows (``updates.with_room``).

Shapes: T tokens, I inputs and O outputs of the linear, R rows of A.
"""

from typing import Any

import torch
import torch.nn.functional as F

from megarl import progress
from megarl.model.layers.updates import input_gradient

# Rows and columns of a matrix of which cuBLAS has its fast kernels, in 16 bits.
ALIGNED = 8


def linear_beside(
    base: Any, hidden: torch.Tensor, low: torch.Tensor, matrix: torch.Tensor, room: torch.Tensor | None
) -> tuple[tuple[torch.Tensor, torch.Tensor | None], torch.Tensor]:
    """Return what ``base`` does of ``hidden``, and ``low``. The gradient of ``hidden`` takes in what comes through low.

    Args:
        base: a frozen linear of mcore's, on one rank.
        hidden: ``[..., I]``.
        low: ``hidden @ matrix.T``, ``[..., R]``. What made it gets its gradient, and may not add to that of ``hidden``.
        matrix: A, ``[R, I]``; gets no gradient here.
        room: what ``with_rows_behind`` returned for the base's weight; None if there is none.
    """
    if not unhooked(base):
        hidden, low = _TakeIn.apply(hidden, low, matrix)
        return base(hidden), low
    out, low = _LinearBeside.apply(hidden, low, base.weight, matrix, room)
    return with_bias(base, out), low


def with_bias(base: Any, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Add a linear's bias, or return it beside ``out``, as the linear does."""
    return (out, base.bias) if base.bias is None or base.skip_bias_add else (out + base.bias, None)


def unhooked(base: torch.nn.Module) -> bool:
    """Return True if a module has no hooks, which would not be called if it is computed in another way."""
    return not (base._forward_hooks or base._forward_pre_hooks or base._backward_hooks or base._backward_pre_hooks)


class _TakeIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, low: torch.Tensor, matrix: torch.Tensor) -> Any:
        ctx.save_for_backward(matrix)
        return hidden.detach(), low.detach()

    @staticmethod
    def backward(ctx: Any, by_hidden: torch.Tensor, by_low: torch.Tensor) -> Any:
        """Return the gradients of ``hidden [..., I]``, not over that of the linear, and of ``low [..., R]``."""
        (matrix,) = ctx.saved_tensors
        narrow = by_low.reshape(-1, by_low.shape[-1])
        whole = torch.addmm(by_hidden.reshape(-1, by_hidden.shape[-1]), narrow, matrix)
        return whole.view(by_hidden.shape), by_low, None


class _LinearBeside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, low: torch.Tensor, weight: Any, matrix: Any, room: Any) -> Any:
        progress.made()
        ctx.save_for_backward(weight, matrix)
        ctx.room = room
        return F.linear(hidden, weight), low.detach()

    @staticmethod
    def backward(ctx: Any, by_out: torch.Tensor, by_low: torch.Tensor) -> Any:
        """Return the gradients of ``hidden [..., I]`` and of ``low [..., R]``, from those of the output and ``low``."""
        progress.made()
        weight, matrix = ctx.saved_tensors
        return input_gradient(by_out, by_low, weight, matrix, ctx.room), by_low, None, None, None


def with_rows_behind(weight: torch.nn.Parameter, rows: int) -> torch.Tensor | None:
    """Move a weight ``[O, I]`` to memory with room for ``rows`` more behind its own; return all of it ``[.., I]``.

    Returns None, and moves nothing, if products of such sizes would be slow.
    """
    if rows % ALIGNED or len(weight) % ALIGNED:
        return None
    room = weight.new_empty(len(weight) + rows, weight.shape[1])
    room[: len(weight)] = weight.detach()
    weight.data = room[: len(weight)]
    if weight.is_cuda:
        torch.cuda.empty_cache()  # No other weight fits where this one was.
    return room
