# SPDX-License-Identifier: Apache-2.0
"""Test the sizes that packs are rounded up to for CUDA graphs; tests/gpu has the graphs themselves."""

import pytest
import torch
from megatron.core.tensor_parallel import random

from megarl.errors import UnsupportedError
from megarl.model.layers.attention.core import PackedSequences
from megarl.model.step.graphs import SIZES, _without_randomness, graphed, token_unit


@pytest.mark.parametrize(("budget", "multiple"), [(8192, 1), (8192, 2), (1000, 4), (17, 8), (2, 1)])
def test_packs_within_a_budget_have_few_sizes(budget, multiple):
    unit = token_unit(budget, multiple)
    assert unit % multiple == 0
    assert len({-(-tokens // unit) for tokens in range(1, budget + 1)}) <= SIZES
    assert budget <= SIZES * unit < budget + SIZES * 16 * multiple


def test_room_is_made_by_empty_sequences():
    packed = PackedSequences.from_lengths((3, 5, 2), torch.device("cpu"))
    assert packed.thd.qkv_format == "thd"
    padded = packed.padded_to(6, 8)
    assert padded.query_bounds.tolist() == [0, 3, 8, 10, 10, 10, 10]
    assert (padded.longest_query, padded.longest_key, padded.thd.max_seqlen_q) == (8, 8, 8)
    assert padded.thd.cu_seqlens_kv is padded.query_bounds
    assert packed.query_bounds.tolist() == [0, 3, 8, 10]
    assert packed.longest_query == 5


def test_a_cpu_has_no_graphs():
    with pytest.raises(UnsupportedError, match="needs a GPU"):
        graphed([], torch.device("cpu"))


def test_a_capture_leaves_the_random_states_of_the_tracker(monkeypatch):
    tracker = random.CudaRNGStatesTracker()
    tracker.set_states({"model-parallel-rng": torch.arange(16, dtype=torch.uint8)})
    monkeypatch.setattr(random, "_CUDA_RNG_STATE_TRACKER", tracker)
    monkeypatch.setattr(random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True)
    given = random._get_cuda_rng_state
    with _without_randomness(), random.get_cuda_rng_tracker().fork():
        pass
    assert tracker.get_states()["model-parallel-rng"].tolist() == list(range(16))
    assert random._get_cuda_rng_state is given
