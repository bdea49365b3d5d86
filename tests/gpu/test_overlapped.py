# SPDX-License-Identifier: Apache-2.0
"""GPUs that read each other's memory compute tensor-parallel linears as whole matrices do."""

import pytest
import torch

from megarl.verify.launch import run_ranks
from tests.helpers.overlapped import compute_linears

BOUNDS = {torch.float64: 1e-12, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("world", [2, 4])
def test_linears_are_those_of_whole_matrices(world, dtype):
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    for exchange, found in run_ranks(compute_linears, world, world, False, dtype):
        assert exchange == "Peers"
        assert max(found.values()) < BOUNDS[dtype], found
