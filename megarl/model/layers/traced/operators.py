# SPDX-License-Identifier: Apache-2.0
"""Register operations that torch.compile does not look into, and that cost the host little when they are called.

``torch.library.custom_op`` does the same with more around each call: it checks that results share no memory with
arguments, which ``torch.library.opcheck`` does in the tests, and it has a kernel for autograd even where none is
registered. Each of the four or more calls of a layer in a step would take the host 5 to 15 microseconds longer.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

NAMESPACE = "megarl"


class Operator:
    """An operation ``torch.ops.megarl.NAME``; call it like the function that computes it.

    Its arguments are not changed, and its results share no memory with them or with each other.
    """

    def __init__(self, name: str, function: Callable[..., Any], tags: Sequence[torch.Tag] = ()) -> None:
        """Register the operation.

        Args:
            name: its name in ``torch.ops.megarl``.
            function: computes it on any device; its annotations are the schema (``torch.library.infer_schema``).
            tags: what the compiler must know of it.
        """
        self.name, self.function, self.__doc__ = f"{NAMESPACE}::{name}", function, function.__doc__
        torch.library.define(self.name, torch.library.infer_schema(function, mutates_args=()), tags=tags)
        torch.library.impl(self.name, "CompositeExplicitAutograd", function)
        self.overload = getattr(getattr(torch.ops, NAMESPACE), name).default

    def __call__(self, *args: Any) -> Any:
        """Call the operation; a trace of torch.compile gets a node for it."""
        return self.overload(*args)

    def register_fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register what gives the results' shapes, strides and dtypes from the arguments'."""
        return torch.library.register_fake(self.name, function)

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[..., Any], passes: int | None = None
    ) -> None:
        """Register the backward pass and what is kept for it, as ``torch.library.register_autograd`` takes them.

        Args:
            backward, setup_context: see there. Gradients of results that only ``backward`` reads are None or zeros.
            passes: position of a tensor that ``direct`` also returns, last, for those who read it behind the operation.
                ``backward`` gets its gradient last then, and adds it to its own: autograd would by a kernel of its own.
        """
        torch.library.register_autograd(self.name, backward, setup_context=setup_context)
        self.backward, self.setup_context, self.passes = backward, setup_context, passes

    def direct(self, *args: Any) -> Any:
        """Compute the operation outside traces, with autograd: the same, without what calls in a trace need.

        Returns the results, and behind them the argument that the operation passes, if it does; see
        ``register_autograd``.
        """
        counts = tuple(_tensors_in(arg) for arg in args)
        flat: list[Any] = []
        for arg, count in zip(args, counts, strict=True):
            if count is None:
                flat.append(arg)
            elif count:
                flat += arg
        return _Direct.apply(*flat, self, counts, args)

    def called_by(self, ctx: Any) -> Callable[..., Any]:
        """Return what a backward pass with this context calls."""
        return self.function if hasattr(ctx, "operation") else self.overload


class _Direct(torch.autograd.Function):
    """An operation as autograd takes it: the arguments one after the other, and the items of lists that get gradients.

    Of a list either all tensors get gradients, or none.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        """Compute the operation of ``given[-3]``; see ``Operator.direct``."""
        operation, ctx.lengths, args = given[-3:]
        ctx.operation = operation
        # Else autograd makes zeros for results that only the backward pass reads: 0.2 ms in a layer of 8B.
        ctx.set_materialize_grads(False)
        output = operation.function(*args)
        operation.setup_context(ctx, args, output)
        return output if operation.passes is None else (*output, args[operation.passes].detach())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradients of all that ``forward`` got."""
        flat: list[Any] = []
        for count, gradient in zip(ctx.lengths, ctx.operation.backward(ctx, *gradients), strict=True):
            if count is None:
                flat.append(gradient)
            else:
                flat += gradient[:count] if gradient is not None else [None] * count
        return *flat, None, None, None


def _tensors_in(arg: Any) -> int | None:
    """Return the length of a list of tensors that get gradients, 0 for another list, None for anything else."""
    if not isinstance(arg, list):
        return None
    return len(arg) if arg and isinstance(arg[0], torch.Tensor) and arg[0].requires_grad else 0


def operator(name: str, tags: Sequence[torch.Tag] = ()) -> Callable[[Callable[..., Any]], Operator]:
    """Make an operation of the function that this decorates; see ``Operator``."""
    return lambda function: Operator(name, function, tags)
