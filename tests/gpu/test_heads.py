# SPDX-License-Identifier: Apache-2.0
"""Check that the kernel between the qkv projection and attention rounds no more than once."""

import pytest
import torch

from tests.helpers.heads import LAYOUTS, errors

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("heads", LAYOUTS, ids=str)
def test_heads_are_prepared_as_accurately_as_bf16_allows(heads, norm):
    for name, (error, allowed) in errors(heads, norm, torch.bfloat16, "cuda").items():
        assert error <= 2.0**-9 and error <= allowed + 1e-7, (name, error, allowed)
