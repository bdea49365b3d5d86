"""A linear and its adapter in one product, against the products apart and against PEFT's formula, in float64."""

from types import SimpleNamespace

import pytest
import torch

from megarl.errors import MegarlError
from megarl.lora.products import Layout
from megarl.lora.room import Room, can_make_room, one_product
from tests.unit.lora.test_products import HEADS, INPUTS, ROWS, TOKENS, fuse

RANKS, SCALINGS = (2, 3, 1), (0.5, 2.0, 1.25)
CASES = [("single", (0,)), ("gated", (0, 1)), ("gated", (1,)), ("qkv", (0, 1, 2)), ("qkv", (0, 2)), ("qkv", (1,))]


def layout_of(fusion: str, adapted: tuple[int, ...]) -> Layout:
    return Layout(adapted, tuple(RANKS[i] for i in adapted), tuple(SCALINGS[i] for i in adapted), fusion, HEADS)


class Drawn:
    """Inputs and matrices of a layer, with gradients."""

    def __init__(self, fusion: str, adapted: tuple[int, ...], seed: int = 0) -> None:
        self.fusion, self.adapted, self.layout = fusion, adapted, layout_of(fusion, adapted)
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

        self.hidden = draw(TOKENS, 1, INPUTS)
        self.a = [draw(RANKS[index], INPUTS) for index in adapted]
        self.b = [draw(ROWS[fusion][index], RANKS[index]) for index in adapted]
        self.mix = draw(TOKENS, 1, sum(ROWS[fusion])).detach()

    def truth(self, weight: torch.Tensor) -> torch.Tensor:
        parts = [torch.zeros(TOKENS, 1, rows, dtype=torch.float64) for rows in ROWS[self.fusion]]
        for index, a, b in zip(self.adapted, self.a, self.b, strict=True):
            parts[index] = SCALINGS[index] * (self.hidden @ a.T @ b.T)
        return self.hidden @ weight.T + fuse(parts, self.fusion)

    def gradients(self, out: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad((self.mix * out).sum(), [self.hidden, *self.a, *self.b], retain_graph=True))


@pytest.mark.parametrize("spare", [True, False])
@pytest.mark.parametrize(("fusion", "adapted"), CASES)
def test_one_product_equals_one_per_part(fusion: str, adapted: tuple[int, ...], spare: bool) -> None:
    drawn = Drawn(fusion, adapted)
    weight = torch.nn.Parameter(torch.randn(sum(ROWS[fusion]), INPUTS, dtype=torch.float64), requires_grad=False)
    before = weight.clone()
    room = Room.beside(weight, drawn.layout)
    assert torch.equal(weight, before)
    hidden = drawn.hidden
    if spare:
        # What lies behind the rows must not matter.
        wide = torch.full((TOKENS, 1, INPUTS + drawn.layout.columns), torch.nan, dtype=torch.float64)
        hidden = wide[..., :INPUTS].copy_(hidden)
    ours = one_product(hidden, torch.cat(drawn.a), drawn.b, drawn.layout, room, spare=spare)

    torch.testing.assert_close(ours, drawn.truth(before), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(drawn.gradients(ours), drawn.gradients(drawn.truth(before)), rtol=1e-12, atol=1e-12)
    assert torch.equal(weight, before)


def test_two_adapters_share_the_room_whichever_computed_last() -> None:
    first, second = Drawn("gated", (0, 1)), Drawn("gated", (0, 1), seed=1)
    weight = torch.nn.Parameter(torch.randn(sum(ROWS["gated"]), INPUTS, dtype=torch.float64), requires_grad=False)
    room = Room.beside(weight, first.layout)
    ours = [one_product(d.hidden, torch.cat(d.a), d.b, d.layout, room, spare=False) for d in (first, second)]
    for drawn, out in zip((first, second), ours, strict=True):
        torch.testing.assert_close(drawn.gradients(out), drawn.gradients(drawn.truth(weight)), rtol=1e-12, atol=1e-12)


def test_an_input_that_needs_no_gradient_gets_none() -> None:
    drawn = Drawn("qkv", (0, 2))
    weight = torch.nn.Parameter(torch.randn(sum(ROWS["qkv"]), INPUTS, dtype=torch.float64), requires_grad=False)
    room = Room.beside(weight, drawn.layout)
    out = one_product(drawn.hidden.detach(), torch.cat(drawn.a), drawn.b, drawn.layout, room, spare=False)
    leaves = [*drawn.a, *drawn.b]
    found = torch.autograd.grad((drawn.mix * out).sum(), leaves)
    expected = torch.autograd.grad((drawn.mix * drawn.truth(weight)).sum(), leaves)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_weight_that_was_moved_is_noticed() -> None:
    base = torch.nn.Linear(INPUTS, 10, bias=False)
    room = Room.beside(base.weight, layout_of("single", (0,)))
    assert room.weight(base) is base.weight
    base.to(torch.float64)
    with pytest.raises(MegarlError, match="moved or cast"):
        room.weight(base)


def linear(inputs: int, *, bias: bool = False, trained: bool = False, **config: str) -> torch.nn.Linear:
    made = torch.nn.Linear(inputs, 16, bias=bias).requires_grad_(trained)
    made.config = SimpleNamespace(**config)
    return made


def test_a_linear_that_is_more_than_a_product_or_whose_rows_would_not_be_aligned_gets_no_room() -> None:
    layout = Layout((0, 1, 2), (16, 16, 16), (1.0,) * 3, "qkv", HEADS)
    assert can_make_room(linear(64), layout)
    assert can_make_room(linear(64, fp8=None), layout)
    others = [linear(60), linear(64, bias=True), linear(64, trained=True), linear(64, fp8="e4m3"), linear(64, fp4="x")]
    assert not any(can_make_room(other, layout) for other in others)
    assert not can_make_room(linear(64), Layout((0, 1, 2), (4, 4, 4), (1.0,) * 3, "qkv", HEADS))
