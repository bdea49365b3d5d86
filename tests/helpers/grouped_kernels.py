# SPDX-License-Identifier: Apache-2.0
"""Compare a linear of all experts, with adapters, with each expert's products in float64.

Run as a program (`python -m tests.helpers.grouped_kernels`), it uses float32 on the CPU and Triton's interpreter.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megarl.model.layers.experts.adapted import adapted_product
from megarl.model.layers.experts.grouped import PartOfAll

# Tokens of each expert: tiles with tokens of one, of many and of the last one alone; experts without any.
COUNTS = {"some idle": [3, 0, 0, 131, 0, 64, 1, 0], "one alone": [0, 0, 90, 0], "none": [0, 0], "even": [64, 64, 64]}


class Shape(NamedTuple):
    """A linear, and of each part that has an adapter its place, the first of its columns and its rank."""

    inputs: int
    outputs: int
    count: int
    parts: tuple[tuple[int, int, int], ...]


SHAPES = {
    "two parts": Shape(48, 160, 2, ((0, 0, 8), (1, 8, 16))),
    "one of two": Shape(200, 96, 2, ((1, 0, 8),)),
    "one A": Shape(64, 288, 2, ((0, 0, 16), (1, 0, 16))),
    "whole": Shape(136, 72, 1, ((0, 0, 40),)),
}
# Each part's factor.
SCALES = (2.0, 0.75)


def errors(counts: Sequence[int], shape: Shape, dtype: torch.dtype, device: str) -> dict[str, float]:
    """Return the relative error of the output and of each gradient."""
    torch.manual_seed(0)

    def draw(*sizes: int) -> torch.Tensor:
        return (torch.randn(*sizes) / sizes[-1] ** 0.5).to(device, dtype).requires_grad_()

    experts, rank = len(counts), max(start + rank for _, start, rank in shape.parts)
    tokens, matrices_a = draw(sum(counts), shape.inputs), draw(experts, rank, shape.inputs)
    weights = draw(experts, shape.outputs, shape.inputs).detach()
    matrices = [draw(experts, shape.outputs // shape.count, rank) for *_, rank in shape.parts]
    # Rows that are not adjacent.
    slope = torch.randn(sum(counts), shape.outputs + 8).to(device, dtype)[:, : shape.outputs]
    given = [tokens, matrices_a, *matrices]
    parts = [
        PartOfAll(place, start, scale, matrix)
        for (place, start, _), scale, matrix in zip(shape.parts, SCALES, matrices, strict=False)
    ]
    ends = torch.tensor(counts).cumsum(0).to(device, torch.int32)
    out = adapted_product(tokens, weights, matrices_a, parts, shape.count, ends)
    found = [out, *torch.autograd.grad(out, given, slope)]

    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    true = _each(counts, shape, weights.double(), *exact)
    wanted = [true, *torch.autograd.grad(true, exact, slope.double())]
    names = ("output", "tokens", "A", *(f"B of part {place}" for place, *_ in shape.parts))
    return {
        name: float((mine - theirs).norm() / theirs.norm().clamp(min=1e-30))
        for name, mine, theirs in zip(names, found, wanted, strict=True)
    }


def _each(
    counts: Sequence[int], shape: Shape, weights: torch.Tensor, tokens: torch.Tensor, matrices_a: torch.Tensor,
    *matrices: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Compute each expert's tokens by themselves."""
    outputs = []
    for expert, rows in enumerate(tokens.split(list(counts))):
        pieces = list((rows @ weights[expert].t()).chunk(shape.count, dim=-1))
        low = rows @ matrices_a[expert].t()
        for (place, start, rank), scale, matrix in zip(shape.parts, SCALES, matrices, strict=False):
            pieces[place] = pieces[place] + scale * low[:, start : start + rank] @ matrix[expert].t()
        outputs.append(torch.cat(pieces, dim=-1))
    return torch.cat(outputs)


def main() -> None:
    """Check every shape for every distribution of tokens."""
    for name, shape in SHAPES.items():
        for kind, counts in COUNTS.items():
            for what, error in errors(counts, shape, torch.float32, "cpu").items():
                assert error < 1e-5, (name, kind, what, error)


if __name__ == "__main__":
    main()
