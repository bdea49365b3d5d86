# SPDX-License-Identifier: Apache-2.0
"""Weights of experts as one tensor: where they lie, and where their gradients go."""

import pytest
import torch

from megarl.model.layers.experts.grouped import GroupedLinear, place_together, weights_together
from megarl.model.layers.experts.packed import PackedExperts
from megarl.model.layers.experts.stacks import stacked
from megarl.parallel.stacks import place

COUNTS = torch.tensor([3, 0, 4])
ENDS = COUNTS.cumsum(0).to(torch.int32)


def linears() -> list[torch.nn.Linear]:
    """Return a linear of each expert, whose weights lie together."""
    torch.manual_seed(0)
    made = [torch.nn.Linear(8, 12, bias=False) for _ in COUNTS]
    place_together(made)
    for linear in made:
        torch.nn.init.normal_(linear.weight)
    return made


def gradients(made: list[torch.nn.Linear], *, together: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the output, and the gradient of each weight."""
    tokens, slope = torch.linspace(-1, 1, 7 * 8).view(7, 8), torch.linspace(1, 2, 7 * 12).view(7, 12)
    if together:
        grouped = GroupedLinear.of(made)
        assert grouped is not None
        out = grouped(tokens, ENDS)
    else:
        out = torch.cat([linear(part) for linear, part in zip(made, tokens.split(COUNTS.tolist()), strict=True)])
    out.backward(slope)
    found = [linear.weight.main_grad if hasattr(linear.weight, "main_grad") else linear.weight.grad for linear in made]
    return out.detach(), found


def test_trained_weights_get_the_gradients_that_each_alone_gets():
    expected_out, expected = gradients(linears(), together=False)
    made = linears()
    for linear in made:
        linear.weight.reduced_early = False
        linear.weight.main_grad = torch.full_like(linear.weight, 0.5, dtype=torch.float32)
    out, found = gradients(made, together=True)
    torch.testing.assert_close(out, expected_out)
    for mine, true in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, true + 0.5)


@pytest.mark.parametrize("early", [None, True, False], ids=["no DDP", "overlapped", "hooked before"])
def test_trained_weights_whose_hooks_matter_run_one_by_one(early):
    made = linears()
    for linear in made:
        if early is not None:
            linear.weight.reduced_early = early
    if early is False:
        made[0].register_forward_pre_hook(lambda *given: None)
    assert GroupedLinear.of(made) is None
    with torch.no_grad():
        assert GroupedLinear.of(made) is not None


def test_frozen_weights_are_one_view_and_weights_that_moved_are_not():
    made = linears()
    for linear in made:
        linear.weight.requires_grad_(False)
    together = weights_together(made)
    assert together is not None and together.data_ptr() == made[0].weight.data_ptr()
    assert all(torch.equal(together[number], linear.weight) for number, linear in enumerate(made))
    made[-1].weight.data = made[-1].weight.data.clone()
    assert weights_together(made) is None and GroupedLinear.of(made) is None


def test_what_hooks_would_miss_runs_one_by_one():
    made = linears()
    made[1].register_forward_hook(lambda *given: None)
    assert GroupedLinear.of(made) is None
    assert GroupedLinear.of([torch.nn.Linear(8, 12), torch.nn.Linear(8, 12)]) is None  # with a bias


def test_values_move_along_and_stacks_get_gradients_without_a_buffer():
    alone = [torch.nn.Linear(8, 12, bias=False) for _ in COUNTS]
    before = [linear.weight.detach().clone() for linear in alone]
    place_together(alone)
    assert all(torch.equal(linear.weight, old) for linear, old in zip(alone, before, strict=True))
    stacked([[linear.weight] for linear in alone]).square().sum().backward()
    for linear in alone:
        torch.testing.assert_close(linear.weight.grad, 2 * linear.weight.detach())


def test_without_gradients_nothing_is_added_anywhere():
    made = linears()
    with torch.no_grad():
        assert torch.equal(stacked([[linear.weight] for linear in made]), torch.stack([one.weight for one in made]))


def test_training_does_not_visit_the_experts():
    class Experts(PackedExperts):
        def __init__(self):
            torch.nn.Module.__init__(self)
            self.local_experts = torch.nn.ModuleList([torch.nn.Linear(2, 2)])

    model = torch.nn.Sequential(Experts(), torch.nn.Dropout())
    assert not model.eval()[0].training and not model[1].training
    assert model[0].local_experts[0].training
    assert model.train()[0].training and model[1].training


def placed(experts: int = 3) -> tuple[list[list[torch.nn.Parameter]], torch.Tensor]:
    """Return two matrices of each expert, of 2 and 3 rows, and the gradients of all, both in one piece of memory."""
    weights, sums = torch.randn(experts * 5, 4), torch.zeros(experts * 5, 4)
    groups = [[torch.nn.Parameter(part) for part in rows.split([2, 3])] for rows in weights.split(5)]
    for group, rows in zip(groups, sums.split(5), strict=True):
        for matrix, part in zip(group, rows.split([2, 3]), strict=True):
            matrix.main_grad, matrix.reduced_early = part, False
    place(groups)
    return groups, sums


def test_matrices_that_lie_together_are_read_where_they_are():
    groups, sums = placed()
    together = stacked(groups)
    assert together.data_ptr() == groups[0][0].data_ptr() and together.shape == (3, 5, 4)
    assert torch.equal(together, torch.stack([torch.cat(list(group)) for group in groups]))
    for _ in range(2):  # gradients of micro-batches add up
        (stacked(groups) * torch.arange(60.0).view(3, 5, 4)).sum().backward()
    assert torch.equal(sums, 2 * torch.arange(60.0).view(15, 4))
    assert all(matrix.grad is None for group in groups for matrix in group)


@pytest.mark.parametrize("change", ["data", "main_grad", "experts", "hook"])
def test_matrices_that_were_moved_are_stacked(change):
    groups, _ = placed()
    first = groups[0][0]
    if change == "data":
        first.data = first.data.clone() + 1
    elif change == "main_grad":
        first.main_grad = torch.zeros(2, 4)
    elif change == "experts":
        groups = groups[:2]
    else:
        first.reduced_early = True
    together = stacked(groups)
    assert together.data_ptr() != first.data_ptr()
    assert torch.equal(together, torch.stack([torch.cat(list(group)) for group in groups]))
    together.sum().backward()
    gradients = [first.grad if change == "hook" else first.main_grad, groups[1][1].main_grad]
    assert all(torch.equal(gradient, torch.ones_like(gradient)) for gradient in gradients)
