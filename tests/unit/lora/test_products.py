# SPDX-License-Identifier: Apache-2.0
"""Compare the fused products of a LoRA update with the formula written out, in float64."""

import pytest
import torch

from megarl.lora.layers.products import Layout, add_wide, project_through
from megarl.lora.layers.traced_linear import adapted_linear, numbers_of
from megarl.model.weights.fusion import HeadLayout

HEADS = HeadLayout(groups=2, queries=3, head_dim=4)
INPUTS, TOKENS = 6, 5
# Rows of each part, in the order of the fused layer.
ROWS = {"single": (10,), "gated": (8, 8), "qkv": (24, 8, 8)}


def fuse(parts: list[torch.Tensor], fusion: str) -> torch.Tensor:
    """Order the columns of the parts as the fused layer does: for q, k, v per group its queries, its key, its value."""
    if fusion != "qkv":
        return torch.cat(parts, dim=-1)
    grouped = [part.view(*part.shape[:-1], HEADS.groups, -1) for part in parts]
    return torch.cat(grouped, dim=-1).flatten(-2)


@pytest.mark.parametrize(
    ("fusion", "adapted"),
    [("single", (0,)), ("gated", (0, 1)), ("gated", (1,)), ("qkv", (0, 1, 2)), ("qkv", (0, 2)), ("qkv", (1,))],
)
def test_the_fused_update_equals_one_product_per_part(fusion: str, adapted: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    ranks, scalings = (2, 3, 1), (0.5, 2.0, 1.25)
    hidden, weight = draw(TOKENS, 1, INPUTS), draw(sum(ROWS[fusion]), INPUTS)
    a = [draw(ranks[index], INPUTS) for index in adapted]
    b = [draw(ROWS[fusion][index], ranks[index]) for index in adapted]
    mix = torch.linspace(-1, 2, TOKENS * sum(ROWS[fusion]), dtype=torch.float64).view(TOKENS, 1, -1)

    layout = Layout(adapted, tuple(ranks[i] for i in adapted), tuple(scalings[i] for i in adapted), fusion, HEADS)
    through, low = project_through(hidden, torch.cat(a))
    ours = add_wide(through @ weight.T, low, b, layout)
    parts = [torch.zeros(TOKENS, 1, rows, dtype=torch.float64) for rows in ROWS[fusion]]
    for index, matrix_a, matrix_b in zip(adapted, a, b, strict=True):
        parts[index] = scalings[index] * (hidden @ matrix_a.T @ matrix_b.T)
    truth = hidden @ weight.T + fuse(parts, fusion)

    torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)
    leaves = (hidden, weight, *a, *b)
    gradients = torch.autograd.grad((mix * ours).sum(), leaves)
    expected = torch.autograd.grad((mix * truth).sum(), leaves)
    torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=1e-12)

    # The operator of compiled layers; its weight is frozen.
    traced, _ = adapted_linear(hidden, weight, torch.cat(a), b, *numbers_of(layout))
    torch.testing.assert_close(traced, truth, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad((mix * traced).sum(), (hidden, *a, *b))
    torch.testing.assert_close(gradients, (expected[0], *expected[2:]), rtol=1e-12, atol=1e-12)


def test_an_output_that_the_base_needs_again_is_not_silently_changed() -> None:
    hidden, b = torch.randn(4, 3, requires_grad=True), torch.randn(3, 2, requires_grad=True)
    kept = hidden.sigmoid()  # its backward needs its output
    ours = add_wide(kept, torch.randn(4, 2), [b], Layout((0,), (2,), (1.0,), "single", HEADS))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        ours.sum().backward()


def test_parts_that_share_a_equal_one_product_with_both_bs() -> None:
    """Gate and up of one parameter: the same columns of ``low`` for both, whose gradients add up."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    hidden, weight, a, b = draw(TOKENS, 1, INPUTS), draw(16, INPUTS), draw(3, INPUTS), [draw(8, 3), draw(8, 3)]
    layout = Layout((0, 1), (3, 3), (0.5, 0.5), "gated", HEADS, (0, 0))
    assert layout.columns == 3
    through, low = project_through(hidden, a)
    ours = add_wide(through @ weight.T, low, b, layout)
    truth = hidden @ (weight + 0.5 * torch.cat(b) @ a).T
    torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)
    mix, leaves = torch.linspace(-1, 2, truth.numel(), dtype=torch.float64).view_as(truth), (hidden, weight, a, *b)
    gradients = torch.autograd.grad((mix * ours).sum(), leaves)
    torch.testing.assert_close(gradients, torch.autograd.grad((mix * truth).sum(), leaves), rtol=1e-12, atol=1e-12)
