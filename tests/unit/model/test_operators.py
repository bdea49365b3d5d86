# SPDX-License-Identifier: Apache-2.0
"""Operations that are called directly: what reaches their backward pass, and what autograd need not do around it."""

from typing import Any

import torch

from megarl.model.layers.traced.operators import operator

SEEN: list[Any] = []


@operator("test_scaled")
def scaled(states: torch.Tensor, matrices: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the states times every matrix, and the same for the backward pass."""
    product = states.clone()
    for matrix in matrices:
        product = product * matrix
    return product, states * 2


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    states, matrices = inputs
    ctx.save_for_backward(states, output[1], *matrices)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, by_product: torch.Tensor, *others: Any) -> tuple:
    SEEN.append(others)
    states, doubled, first, second = ctx.saved_tensors
    by_states = by_product * first * second
    if others[-1] is not None:
        by_states = by_states + others[-1]
    return by_states, [by_product * doubled / 2 * second, by_product * states * first]


scaled.register_autograd(_differentiate, setup_context=_save, passes=0)


def test_a_direct_operation_gets_the_gradient_of_what_it_passes_and_no_zeros():
    torch.manual_seed(0)
    given = [torch.randn(3, requires_grad=True) for _ in range(3)]
    states, first, second = given
    product, kept, passed = scaled.direct(states, [first, second])
    assert not kept.requires_grad and torch.equal(passed, states)
    (product * torch.arange(3.0) + passed.square()).sum().backward()
    by_kept, by_passed = SEEN.pop()
    assert by_kept is None
    assert torch.equal(by_passed, 2 * states.detach())
    found = [tensor.grad for tensor in given]
    loss = (states * first * second * torch.arange(3.0) + states.square()).sum()
    for ours, theirs in zip(found, torch.autograd.grad(loss, given), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_direct_operation_takes_no_gradient_of_what_is_not_read():
    states, matrix = torch.ones(2, requires_grad=True), torch.full((2,), 3.0)
    product, *_ = scaled.direct(states, [matrix, matrix])
    product.sum().backward()
    assert SEEN.pop() == (None, None)
    assert states.grad.tolist() == [9.0, 9.0]
