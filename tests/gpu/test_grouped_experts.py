# SPDX-License-Identifier: Apache-2.0
"""Grouped products in bf16 round as those of each expert alone do, and experts without tokens have a gradient of 0."""

import pytest
import torch

from megarl.model.layers.experts.grouped import grouped_product, wants_groups
from megarl.model.layers.experts.stacks import stacked
from megarl.parallel.stacks import place
from tests.helpers import grouped_kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

COUNTS = {"some idle": [3, 0, 0, 517, 0, 64, 1, 0], "one alone": [0, 0, 0, 900, 0, 0, 0, 0], "all": [65] * 8}
SIZES = {"wide": (256, 384), "rank 8": (256, 8), "from rank 8": (8, 384)}


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_products_and_gradients_equal_those_of_each_expert(counts, sizes, together):
    inputs, outputs = sizes
    torch.manual_seed(0)
    tokens = torch.randn(sum(counts), inputs, device="cuda").bfloat16().requires_grad_()
    if not wants_groups(tokens, outputs):
        pytest.skip("experts run one by one on this GPU")
    weights = torch.randn(len(counts), outputs, inputs, device="cuda").bfloat16()
    sums = torch.zeros(weights.shape, device="cuda")
    matrices = [torch.nn.Parameter(weight) for weight in weights]
    for matrix, total in zip(matrices, sums, strict=True):
        matrix.reduced_early, matrix.main_grad = False, total
    groups = [[matrix] for matrix in matrices]
    if together:
        place(groups)
    # As half of a wider output's gradient: rows that are not adjacent.
    slope = torch.randn(sum(counts), 2 * outputs, device="cuda").bfloat16()[:, outputs:]
    # Memory that results may take over holds NaN: what a kernel leaves out would show.
    used = [torch.full_like(torch.stack(matrices), torch.nan) for _ in range(4)]
    used.clear()
    ends = torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)
    out = grouped_product(tokens, stacked(groups), ends)
    out.backward(slope)

    exact, parts = tokens.detach().double().requires_grad_(), [m.detach().double().requires_grad_() for m in matrices]
    true = torch.cat([part @ m.t() for part, m in zip(exact.split(counts), parts, strict=True)])
    wanted = torch.autograd.grad(true, [exact, *parts], slope.double())
    found = [out, tokens.grad, *(matrix.main_grad for matrix in matrices)]
    for actual, expected in zip(found, [true, *wanted], strict=True):
        assert (actual.double() - expected).norm() <= 2.0**-8 * expected.norm()
    assert all(not matrix.main_grad.any() for matrix, count in zip(matrices, counts, strict=True) if not count)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("shape", grouped_kernels.SHAPES.values(), ids=grouped_kernels.SHAPES)
def test_updates_of_all_experts_round_as_products_do(counts, shape):
    """A and B are summed over tokens in 16 bits' inputs; low and its gradient are rounded once in between."""
    if not wants_groups(torch.empty(1, 64, device="cuda", dtype=torch.bfloat16), 64):
        pytest.skip("experts run one by one on this GPU")
    found = grouped_kernels.errors(counts, shape, torch.bfloat16, "cuda")
    assert max(found.values()) <= 2.0**-7, found
