# SPDX-License-Identifier: Apache-2.0
"""Test the sizes that packs are rounded up to for CUDA graphs; tests/gpu has the graphs themselves."""

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel import random

from megarl.errors import UnsupportedError
from megarl.model.step.graphs import SIZES, _same_part, _without_randomness, graphed, token_unit
from megarl.model.step.micro_batch import FEWEST_SEQUENCES, micro_batches, sequence_room
from megarl.model.step.packing import pack
from megarl.types import Sample


@pytest.mark.parametrize(("budget", "multiple"), [(8192, 1), (8192, 2), (1000, 4), (17, 8), (2, 1)])
def test_packs_within_a_budget_have_few_sizes(budget, multiple):
    unit = token_unit(budget, multiple)
    assert unit % multiple == 0
    assert len({-(-tokens // unit) for tokens in range(1, budget + 1)}) <= SIZES
    assert budget <= SIZES * unit < budget + SIZES * 16 * multiple


def test_room_is_made_by_empty_sequences():
    samples = [Sample(np.arange(tokens), np.arange(tokens) > 0) for tokens in (4, 6, 3)]
    [item] = micro_batches(pack(samples, None, max_tokens=16), 0, torch.device("cpu"))
    packed = item.packed
    assert packed.thd.qkv_format == "thd"
    padded = packed.bounded(item.inputs.bounds, 8)
    assert padded.query_bounds.tolist() == [0, 3, 8, 10, *[10] * (FEWEST_SEQUENCES - 3)]
    assert (padded.longest_query, padded.longest_key, padded.thd.max_seqlen_q) == (8, 8, 8)
    assert padded.thd.cu_seqlens_kv is padded.query_bounds
    assert packed.query_bounds.tolist() == [0, 3, 8, 10]
    assert packed.longest_query == 5


def test_a_copy_of_a_micro_batch_s_memory_holds_its_tensors():
    samples = [Sample(np.arange(tokens), np.arange(tokens) > 0) for tokens in (4, 6, 30)]
    batch = pack(samples, None, max_tokens=64)
    [item] = micro_batches(batch, 0, torch.device("cpu"))
    copied = item.inputs.memory.clone()
    for tensor in (item.tokens_T, item.positions_T, item.inputs.bounds):
        assert torch.equal(_same_part(copied, item.inputs.memory, tensor), tensor)
    # Packs of the same tokens and room have memory of the same size, and the same places in it.
    [other] = micro_batches(pack(samples[::-1], None, max_tokens=64), 0, torch.device("cpu"))
    copied.copy_(other.inputs.memory)
    assert torch.equal(_same_part(copied, item.inputs.memory, item.tokens_T), other.tokens_T)
    assert sequence_room(17) == 32


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
