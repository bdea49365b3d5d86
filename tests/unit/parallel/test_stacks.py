# SPDX-License-Identifier: Apache-2.0
"""Matrices that lie one after the other in memory are read as one without a copy, others with one."""

import pytest
import torch

from megarl.parallel.stacks import joined


def matrices(kind: str) -> list[torch.Tensor]:
    """Return three matrices of 8 columns."""
    memory = torch.arange(80.0)
    starts = {"adjacent": (0, 16, 40), "with a gap": (0, 16, 48), "in another order": (16, 40, 0)}[kind]
    return [memory[start : start + 8 * rows].view(rows, 8) for start, rows in zip(starts, (2, 3, 4), strict=True)]


@pytest.mark.parametrize(("kind", "copied"), [("adjacent", False), ("with a gap", True), ("in another order", True)])
def test_only_adjacent_matrices_are_not_copied(kind, copied):
    parts = [part.detach().requires_grad_() for part in matrices(kind)]
    whole = joined(parts)
    assert torch.equal(whole, torch.cat(parts))
    assert (whole.data_ptr() == parts[0].data_ptr()) is not copied
    slope = torch.randn_like(whole)
    for gradient, expected in zip(torch.autograd.grad(whole, parts, slope), slope.split([2, 3, 4]), strict=True):
        assert torch.equal(gradient, expected)


def test_a_frozen_part_has_no_gradient():
    first, second, third = matrices("adjacent")
    second.requires_grad_()
    assert torch.equal(torch.autograd.grad(joined([first, second, third]).sum(), second)[0], torch.ones(3, 8))


def test_matrices_of_different_memory_are_copied():
    first, second = torch.ones(2, 8), torch.ones(2, 8)
    assert joined([first, second]).shape == (4, 8) and joined([first]) is first
    wide = torch.ones(2, 16)[:, :8]
    assert torch.equal(joined([wide, wide]), torch.ones(4, 8))
