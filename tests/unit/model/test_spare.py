"""Columns left behind the rows of an activation are for its first reader alone."""

import torch

from megarl.model.spare import offer, take, wanted_by


class Reader(torch.nn.Linear):
    """A linear that wants columns behind activations in 16 bits."""

    def wanted_columns(self, hidden: torch.Tensor) -> int:
        return 16 if hidden.element_size() == 2 else 0


def test_a_linear_without_an_adapter_wants_none():
    hidden = torch.zeros(3, 4)
    assert [wanted_by(linear, hidden) for linear in (torch.nn.Linear(4, 2), Reader(4, 2))] == [0, 0]
    assert wanted_by(Reader(4, 2), hidden.bfloat16()) == 16


def test_only_the_first_reader_gets_them():
    activation = offer(torch.zeros(3, 20)[:, :4], 16)
    assert [take(activation), take(activation)] == [16, 0]


def test_no_other_tensor_says_so():
    activation = offer(torch.zeros(3, 20)[:, :4], 16)
    assert [take(other) for other in (activation[:2], activation.clone(), activation.detach(), activation + 0)] == [
        0
    ] * 4
