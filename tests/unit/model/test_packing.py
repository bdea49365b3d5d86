# SPDX-License-Identifier: Apache-2.0
"""Test packing: nothing is lost, doubled or misaligned, whatever the budget and the layout."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.errors import DataError
from megarl.model.layers.attention.zigzag import padded_length, rank_tokens
from megarl.model.step.micro_batch import micro_batches
from megarl.model.step.packing import flat_offsets, pack, split_by_sample
from megarl.types import Sample

CPU = torch.device("cpu")


def random_samples(lengths: list[int], seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    samples = []
    for length in lengths:
        mask = rng.random(length) < 0.5
        mask[0] = False
        count = int(mask.sum())
        values = rng.normal(size=(3, count)).astype(np.float32)
        # One for the sequence, or one for each token.
        advantage = rng.normal(size=count).astype(np.float32) if length % 2 else float(rng.normal())
        samples.append(Sample(rng.integers(0, 99, length), mask, advantage, *values, group=len(samples) // 2))
    return samples


@settings(max_examples=100)
@given(
    st.lists(st.integers(2, 50), min_size=1, max_size=20),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_every_response_token_keeps_its_label_and_its_values_on_one_rank(lengths, data, pipeline, context, multiple):
    samples = random_samples(lengths)
    weights = np.arange(1, len(samples) + 1, dtype=np.float64)
    batch = pack(samples, weights, max_tokens=64, data=data, pipeline=pipeline, context=context, multiple=multiple)
    assert len({len(rank) for rank in batch.plan}) == 1
    seen, places = [], []
    for rank in range(data):
        for items in zip(*(micro_batches(batch, rank, CPU, context_rank=r) for r in range(context)), strict=True):
            whole = items[0].packed.lengths
            assert all(item.packed.lengths == whole for item in items)
            assert len({len(item.tokens_T) for item in items}) == 1
            for context_rank, item in enumerate(items):
                assert len(item.tokens_T) % multiple == 0
                assert len(item.tokens_T) == sum(item.packed.query_lengths) == sum(whole) // context
                check_alignment(item, batch, rank_tokens(whole, context, context_rank))
                places += item.places_R.tolist()
            tokens = sum(len(samples[index].tokens) - 1 for index in items[0].samples)
            assert sum(padded_length(len(samples[i].tokens) - 1, context) for i in items[0].samples) <= 64
            assert sum(whole) - tokens < 2 * context * len(whole) + 2 * context * multiple
            seen += items[0].samples
    assert sorted(seen) == list(range(len(samples)))
    assert sorted(places) == list(range(int(batch.response_tokens.sum())))


def check_alignment(item, batch, held):
    """Check that each token on the rank is fed at its position, and each response position predicts its label."""
    fed = [np.pad(s.tokens[:-1], (0, n - len(s.tokens) + 1)) for s, n in sequences(item, batch)]
    ends = np.cumsum([0, *item.packed.lengths])
    rest = np.zeros(ends[-1] - sum(len(part) for part in fed), dtype=np.int64)
    np.testing.assert_array_equal(item.tokens_T, np.concatenate([*fed, rest])[held])
    positions = np.concatenate([np.arange(length) for length in item.packed.lengths])
    np.testing.assert_array_equal(item.positions_T, positions[held])
    owner = np.repeat(np.arange(len(batch.samples)), batch.response_tokens)[item.places_R.numpy()]
    within = item.places_R.numpy() - flat_offsets(batch)[owner]
    tokens = item.loss_tokens
    assert tokens.sequence_ids_T.tolist() == [item.samples.index(index) for index in owner]
    assert tokens.group_ids_T.tolist() == [batch.samples[index].group for index in owner]
    assert tokens.num_sequences == len(item.samples)
    for row, (index, rank) in enumerate(zip(owner, within, strict=True)):
        sample = batch.samples[index]
        place = np.flatnonzero(sample.response_mask)[rank]
        fed_at = held[int(item.response_R[row])] - ends[item.samples.index(index)]
        assert (fed_at + 1, int(item.labels_R[row])) == (place, sample.tokens[place])
        assert float(item.loss_tokens.weights_T[row]) == batch.weights_S[index]
        assert float(item.loss_tokens.advantages_T[row]) == np.float32(
            np.broadcast_to(sample.advantage, sample.response_mask.sum())[rank]
        )
        for name in ("sampler_logprobs", "old_logprobs", "reference_logprobs"):
            assert float(getattr(item.loss_tokens, f"{name}_T")[row]) == getattr(sample, name)[rank]


def sequences(item, batch):
    """Return (sample, padded length) of each sequence of the pack that is not padding."""
    return [(batch.samples[index], length) for index, length in zip(item.samples, item.packed.lengths, strict=False)]


def test_vector_over_all_tokens_splits_back():
    batch = pack(random_samples([5, 2, 9]), None, max_tokens=32)
    total = int(batch.response_tokens.sum())
    parts = split_by_sample(np.arange(total), batch)
    assert [len(part) for part in parts] == list(batch.response_tokens)
    assert [part[0] for part in parts if len(part)] == [
        o for o, c in zip(flat_offsets(batch), batch.response_tokens, strict=True) if c
    ]


def test_sample_over_the_budget_is_refused_by_name():
    with pytest.raises(DataError, match=r"sample 1 feeds 40 tokens, more than train.micro_batch_tokens \(32\)"):
        pack(random_samples([5, 41]), None, max_tokens=32)


def test_padding_counts_against_the_budget():
    with pytest.raises(DataError, match=r"feeds 36 tokens \(padded for parallel.context = 3\), more than"):
        pack(random_samples([33]), None, max_tokens=32, context=3)


def test_empty_batch_and_wrong_weights_are_refused():
    with pytest.raises(DataError, match="at least one sample"):
        pack([], None, max_tokens=32)
    with pytest.raises(DataError, match="weights_S has shape"):
        pack(random_samples([5, 6]), np.ones(3), max_tokens=32)


def test_old_logprobs_on_some_samples_only_are_refused():
    first, second = random_samples([5, 6])
    mixed = [first, Sample(second.tokens, second.response_mask, sampler_logprobs=second.sampler_logprobs, group=1)]
    with pytest.raises(DataError, match="some samples of a batch have old_logprobs"):
        micro_batches(pack(mixed, None, max_tokens=32), 0, CPU)


@pytest.mark.parametrize("name", ["sampler_logprobs", "old_logprobs", "reference_logprobs"])
@pytest.mark.parametrize("change", [-1, 1])
def test_logprobs_of_another_length_are_an_error_never_a_broadcast(name, change):
    tokens, mask = np.arange(6), np.array([False, False, True, True, True, False])
    with pytest.raises(DataError, match=f"sample.{name} has shape"):
        Sample(tokens, mask, **{name: np.zeros(3 + change, dtype=np.float32)})


def test_an_advantage_of_another_length_is_refused():
    mask = np.array([False, True, True])
    with pytest.raises(DataError, match=r"sample.advantage has shape \(3,\), but response_mask marks 2 tokens"):
        Sample(np.arange(3), mask, np.zeros(3, dtype=np.float32))
    with pytest.raises(DataError, match=r"sample.advantage is .*nan.*; it must be finite"):
        Sample(np.arange(3), mask, np.array([0.0, np.nan], dtype=np.float32))
