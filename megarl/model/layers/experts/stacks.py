# SPDX-License-Identifier: Apache-2.0
"""Read the matrices of all experts of a rank as one tensor.

Where the optimizer has placed them together that takes no copy. Elsewhere, as with mcore's distributed optimizer, they
are stacked in every pass.
"""

from typing import Any

import torch

from megarl.parallel.stacks import Groups, Stack, has_hook, stack_of


def stacked(groups: Groups) -> torch.Tensor:
    """Return the experts' matrices as one, ``[E, rows, columns]``. ``main_grad`` takes its gradient in one addition.

    Matrix by matrix, through autograd, that takes the host longer than the products take the GPU. It goes that way
    where there is no ``main_grad``, and where mcore waits for each gradient to reduce it early (``reduced_early``).

    Args:
        groups: of each expert the matrices to join by rows; all trained or all frozen.
    """
    stack = stack_of(groups[0][0], len(groups))
    if stack is not None:
        return _FromStack.apply(groups[0][0], stack)
    sides = [_listed([group[index] for group in groups]) for index in range(len(groups[0]))]
    return sides[0] if len(sides) == 1 else torch.cat(sides, dim=1)


def _listed(matrices: list[torch.nn.Parameter]) -> torch.Tensor:
    if torch.is_grad_enabled() and not any(map(has_hook, matrices)):
        return _Listed.apply(matrices[0], matrices)
    return torch.stack(matrices)


class _FromStack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: torch.Tensor, stack: Stack) -> torch.Tensor:
        """Return the stack's weights; the first matrix alone is known to autograd."""
        ctx.gradients = stack.gradients
        return stack.weights.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.gradients.add_(gradients[0])
        return None, None


class _Listed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: torch.Tensor, matrices: list[torch.nn.Parameter]) -> torch.Tensor:
        """Stack the matrices; the first one alone is known to autograd."""
        ctx.matrices = matrices
        return torch.stack(matrices)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        sums = [matrix.main_grad for matrix in ctx.matrices]
        torch._foreach_add_(sums, list(gradients[0].to(sums[0].dtype).unbind()))
        return None, None
