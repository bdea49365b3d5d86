# SPDX-License-Identifier: Apache-2.0
"""A frozen linear beside an A: the gradients are those of plain operations, whatever way they take."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megarl.lora.layers.beside import linear_beside, unhooked, with_rows_behind
from megarl.lora.layers.products import project
from megarl.model.layers.updates import in_one_piece, with_room
from tests.helpers.in_one_piece import InOnePiece

TOKENS, INPUTS, OUTPUTS, RANK = 5, 24, 16, 8


class Base(torch.nn.Module):
    """Has what ``linear_beside`` looks at of mcore's linears."""

    def __init__(self, skip_bias_add: bool | None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = torch.nn.Parameter(torch.randn(OUTPUTS, INPUTS, generator=generator), requires_grad=False)
        self.bias = None if skip_bias_add is None else torch.arange(OUTPUTS, dtype=torch.float32)
        self.skip_bias_add = bool(skip_bias_add)

    def forward(self, hidden: torch.Tensor) -> Any:
        out = F.linear(hidden, self.weight)
        return (out, self.bias) if self.bias is None or self.skip_bias_add else (out + self.bias, None)


@pytest.mark.parametrize("skip_bias_add", [None, False, True])
@pytest.mark.parametrize("way", ["room", "no room", "apart", "moved", "too small", "hooked"])
def test_gradients_are_those_of_plain_operations(way: str, skip_bias_add: bool | None) -> None:
    base, called = Base(skip_bias_add), []
    hidden, matrix = torch.randn(TOKENS, 1, INPUTS), torch.randn(RANK, INPUTS)
    slopes = torch.randn(TOKENS, 1, OUTPUTS), torch.randn(TOKENS, 1, RANK)
    room = with_rows_behind(base.weight, RANK)
    assert room is not None and room.shape == (OUTPUTS + RANK, INPUTS)
    # What lies there is another adapter's, or nothing's.
    room[OUTPUTS:] = float("nan")
    if way == "moved":
        base.weight.data = base.weight.clone()
    if way == "hooked":
        base.register_forward_hook(lambda *_: called.append(True))
    given = {"no room": None, "too small": room[: OUTPUTS + 1]}.get(way, room)

    def ours(hidden: torch.Tensor, matrix: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (out, bias), low = linear_beside(base, hidden, project(hidden, matrix), matrix, given)
        assert (bias is None) == (skip_bias_add is not True)
        return (out, low) if way == "apart" else InOnePiece.apply(out, low)

    def theirs(hidden: torch.Tensor, matrix: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return base(hidden)[0], F.linear(hidden, matrix)

    results = []
    for compute in (ours, theirs):
        leaves = [one.clone().requires_grad_() for one in (hidden, matrix)]
        outs = compute(*leaves)
        results.append([*outs, *torch.autograd.grad(outs, leaves, slopes)])
        assert bool(called) == (way == "hooked")
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_a_weight_keeps_its_values_and_its_identity() -> None:
    weight = Base(None).weight
    before, name = weight.detach().clone(), id(weight)
    room = with_rows_behind(weight, 2 * RANK)
    assert room is not None and room.data_ptr() == weight.data_ptr() and weight.is_contiguous()
    assert torch.equal(weight, before) and id(weight) == name and not weight.requires_grad


@pytest.mark.parametrize(("outputs", "rows"), [(16, 12), (12, 8)])
def test_rows_that_cublas_is_slow_at_get_no_room(outputs: int, rows: int) -> None:
    weight = torch.nn.Parameter(torch.zeros(outputs, INPUTS), requires_grad=False)
    place = weight.data_ptr()
    assert with_rows_behind(weight, rows) is None and weight.data_ptr() == place


def test_pieces_are_told_from_what_only_looks_like_them() -> None:
    wide, narrow = with_room(torch.zeros(TOKENS, 1, OUTPUTS), RANK)
    whole = in_one_piece(wide, narrow)
    assert whole is not None and whole.shape == (TOKENS, OUTPUTS + RANK) and whole.stride() == (32, 1)
    wide.fill_(1.0)
    narrow.fill_(2.0)
    assert torch.equal(whole, torch.tensor([1.0] * OUTPUTS + [2.0] * RANK).expand(TOKENS, -1))
    other, _ = with_room(wide, RANK)
    for one, two in (
        (other, narrow),
        (narrow, wide),
        (wide, narrow.clone()),
        (wide, narrow[..., 1:]),
        (wide[1:], narrow),
    ):
        assert in_one_piece(one, two) is None


def test_a_hook_is_seen() -> None:
    base = Base(None)
    assert unhooked(base)
    base.register_full_backward_hook(lambda *_: None)
    assert not unhooked(base)
