# SPDX-License-Identifier: Apache-2.0
"""Check that the kernels of SwiGLU, weighted SwiGLU, sums of rows, RMSNorm and updates round once.

Each runs twice: the second time it is launched as it was compiled (``quick_launch``).
"""

import pytest
import torch

from tests.helpers import update_kernels
from tests.helpers.row_kernels import SHAPES, norm_errors, sum_errors, swiglu_errors, weighted_errors

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.mark.parametrize("measure", [swiglu_errors, weighted_errors, sum_errors, norm_errors])
@pytest.mark.parametrize(("width", "gap"), SHAPES)
def test_a_kernel_is_as_accurate_as_bf16_allows(measure, width, gap):
    for _ in range(2):
        for name, (error, allowed) in measure(width, gap, torch.bfloat16, "cuda").items():
            assert error <= 2.0**-9 and error <= allowed + 1e-7, (name, error, allowed)


@pytest.mark.parametrize("measure", update_kernels.MEASURES)
@pytest.mark.parametrize("shape", update_kernels.SHAPES, ids=str)
def test_an_update_is_added_as_accurately_as_bf16_allows(measure, shape):
    for _ in range(2):
        for name, (error, allowed) in measure(*shape, torch.bfloat16, "cuda").items():
            # Gradients of low-rank factors are products of rounded tensors.
            assert error <= max(1.1 * allowed, 2.0**-9), (name, error, allowed)


def test_the_second_launch_of_a_kernel_is_quick_and_gives_the_same_bits(monkeypatch):
    from megarl.model.layers.kernels import swiglu

    known = swiglu._swiglu_forward._known
    fused = torch.randn(2, 48, 512, device="cuda", dtype=torch.bfloat16)
    first = [swiglu.result_of(one) for one in fused]
    prepared = swiglu._swiglu_forward.kernel
    monkeypatch.setattr(swiglu._swiglu_forward, "kernel", {})  # from here on only what is remembered can be launched
    again = [swiglu.result_of(one) for one in fused]
    copied = [swiglu.result_of(one.clone()) for one in fused]
    for expected, *others in zip(first, again, copied, strict=True):
        assert all(torch.equal(other, expected) for other in others)
    monkeypatch.setattr(swiglu._swiglu_forward, "kernel", prepared)
    odd = torch.zeros(48 * 512 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(48, 512).copy_(fused[0])
    assert torch.equal(swiglu.result_of(odd), first[0]) and len(known) >= 1
