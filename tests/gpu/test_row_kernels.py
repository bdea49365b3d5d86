# SPDX-License-Identifier: Apache-2.0
"""Check that the kernels of SwiGLU, weighted SwiGLU, sums of rows, RMSNorm and updates round once."""

import pytest
import torch

from tests.helpers import update_kernels
from tests.helpers.row_kernels import SHAPES, norm_errors, sum_errors, swiglu_errors, weighted_errors

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.mark.parametrize("measure", [swiglu_errors, weighted_errors, sum_errors, norm_errors])
@pytest.mark.parametrize(("width", "gap"), SHAPES)
def test_a_kernel_is_as_accurate_as_bf16_allows(measure, width, gap):
    for name, (error, allowed) in measure(width, gap, torch.bfloat16, "cuda").items():
        assert error <= 2.0**-9 and error <= allowed + 1e-7, (name, error, allowed)


@pytest.mark.parametrize("measure", update_kernels.MEASURES)
@pytest.mark.parametrize("shape", update_kernels.SHAPES, ids=str)
def test_an_update_is_added_as_accurately_as_bf16_allows(measure, shape):
    for name, (error, allowed) in measure(*shape, torch.bfloat16, "cuda").items():
        # Gradients of low-rank factors are products of rounded tensors.
        assert error <= max(1.1 * allowed, 2.0**-9), (name, error, allowed)
