# SPDX-License-Identifier: Apache-2.0
"""Test bins: nothing lost, nothing over the budget, full, balanced by work, and planned quickly."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DeepseekV3Config, Qwen3Config, Qwen3MoeConfig

from megarl.model.layers.sequence_work import sequence_work
from megarl.model.step.bins import best_fit, deal, plan_bins
from megarl.model.step.packing import pack
from tests.helpers.timing import fastest
from tests.unit.model.test_packing import random_samples

RNG = np.random.default_rng(0)
# Lengths as rollouts have them: a long tail, two kinds of prompts, any distribution.
LENGTHS = {
    "tail": np.clip(RNG.lognormal(6.3, 0.8, 2048), 32, 8000).astype(int).tolist(),
    "two kinds": np.where(
        RNG.random(2048) < 0.2, RNG.integers(3000, 8000, 2048), RNG.integers(100, 800, 2048)
    ).tolist(),
    "anything": RNG.integers(100, 4000, 2048).tolist(),
}


def cost_of(length):
    return length + length**2 / 5000


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(2, 50), st.floats(0, 100)), min_size=1, max_size=40),
    st.integers(50, 120),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_bins_hold_every_item_once_within_the_budget(items, budget, groups, at_least):
    lengths, costs = zip(*items, strict=True)
    bins = plan_bins(lengths, costs, budget, groups=groups, at_least=at_least)
    assert sorted(index for items in bins for index in items) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in items) <= budget for items in bins)
    assert len(bins) % groups == 0
    assert len(bins) < max(len(best_fit(lengths, budget)), min(groups * at_least, len(lengths))) + groups
    dealt = deal(bins, costs, groups)
    assert {len(rank) for rank in dealt} == {len(bins) // groups}
    assert sorted(tuple(items) for rank in dealt for items in rank) == sorted(map(tuple, bins))


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("items", [256, 2048])
def test_bins_are_full_and_ranks_have_as_much_to_do_whether_or_not_they_wait_for_each_other(name, items):
    lengths, ranks, budget = LENGTHS[name][:items], 8, 16384
    costs = [cost_of(length) for length in lengths]
    dealt = deal(plan_bins(lengths, costs, budget, groups=ranks), costs, ranks)
    rows = [[sum(costs[i] for i in bin_) for bin_ in rank] for rank in dealt]
    mean = sum(map(sum, rows)) / ranks
    # A multiple of the ranks, and not one row more than needed.
    assert len(rows[0]) == -(-sum(lengths) // (budget * ranks))
    assert max(map(sum, rows)) / mean < 1.02
    assert sum(map(max, zip(*rows, strict=True))) / mean < 1.03


def test_bins_of_many_sequences_are_planned_in_a_moment():
    """If every bin were compared with every other, it would take half a minute."""
    lengths = LENGTHS["tail"] * 8
    costs = [cost_of(length) for length in lengths]
    assert fastest(lambda: plan_bins(lengths, costs, 16384, groups=8)) < 10


def test_the_plan_balances_attention_where_sequences_differ():
    config = Qwen3Config(num_hidden_layers=2, hidden_size=64, intermediate_size=64, head_dim=64).to_dict()
    work = sequence_work(config)
    samples = random_samples([1000] * 2 + [100] * 20)
    loads = {}
    for name, chosen in (("work", {"work": work}), ("tokens", {})):
        [first], [second] = pack(samples, None, max_tokens=4000, data=2, **chosen).plan
        loads[name] = [
            sum(work.of(len(samples[i].tokens) - 1, int(samples[i].response_mask.sum())) for i in rank)
            for rank in (first, second)
        ]
        assert {len([i for i in rank if i < 2]) for rank in (first, second)} == {1}
    assert max(loads["work"]) <= max(loads["tokens"])


def test_work_is_that_of_the_models_own_products():
    dense = Qwen3Config(
        num_hidden_layers=3, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=100,
    )  # fmt: skip
    work = sequence_work(dense.to_dict())
    linears = 3 * (64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 96)
    assert work.per_token == 4 * linears
    assert work.per_response == 4 * 64 * 100
    # Two products forward and four backward, over half of the square of the length.
    assert work.of(10, 0) == 10 * 4 * linears + 6 * 2 * 55 * 3 * 4 * 16
    mixture = Qwen3MoeConfig(
        num_hidden_layers=3, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        moe_intermediate_size=24, num_experts_per_tok=4, num_experts=64,
    )  # fmt: skip
    assert sequence_work(mixture.to_dict()).per_token == 4 * linears
    latent = DeepseekV3Config(num_hidden_layers=3).to_dict()
    assert sequence_work(latent).per_pair == 6 * 3 * 128 * (128 + 64 + 128)
