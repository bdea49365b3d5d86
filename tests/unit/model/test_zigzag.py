# SPDX-License-Identifier: Apache-2.0
"""Test the partition of a pack over context-parallel ranks: complete, equal loads, and that of mcore and TE."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.model.layers.attention.zigzag import key_rows, padded_length, rank_runs, rank_tokens

PACKS = st.tuples(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(1, 6))


def padded(lengths: list[int], context: int) -> list[int]:
    return [padded_length(length, context) for length in lengths]


@settings(max_examples=150)
@given(PACKS)
def test_ranks_hold_every_token_once_and_do_equal_work(pack):
    lengths, context = padded(pack[0], pack[1]), pack[1]
    held = [rank_tokens(lengths, context, rank) for rank in range(context)]
    np.testing.assert_array_equal(np.sort(np.concatenate(held)), np.arange(sum(lengths)))
    # A token attends to itself and all before it in its sequence.
    work = np.concatenate([np.arange(1, length + 1) for length in lengths])
    assert len({len(tokens) for tokens in held}) == 1
    assert len({int(work[tokens].sum()) for tokens in held}) == 1


@settings(max_examples=150)
@given(PACKS)
def test_each_run_finds_its_sequence_up_to_its_end_in_the_gathered_pack(pack):
    lengths, context = padded(pack[0], pack[1]), pack[1]
    gathered = np.concatenate([rank_tokens(lengths, context, rank) for rank in range(context)])
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    for rank in range(context):
        tokens, rows = rank_tokens(lengths, context, rank), key_rows(lengths, context, rank)
        queries = keys = 0
        for run in rank_runs(lengths, context, rank):
            mine = tokens[queries : queries + run.length]
            seen = gathered[rows[keys : keys + run.keys]]
            queries, keys = queries + run.length, keys + run.keys
            whole = np.flatnonzero(sequence == sequence[mine[0]])
            np.testing.assert_array_equal(seen, whole[whole <= mine[-1]])
        assert (queries, keys) == (len(tokens), len(rows))


@pytest.mark.parametrize("context", [2, 3, 4])
def test_partition_is_the_one_of_mcores_packed_rope(context):
    """mcore cuts the RoPE table of each packed sequence for Transformer Engine's thd partition."""
    from megatron.core.models.common.embeddings.rope_utils import _get_thd_freqs_on_this_cp_rank

    lengths = padded([5, 1, 30, 12], context)
    positions = np.concatenate([np.arange(length) for length in lengths])
    for rank in range(context):
        expected = [
            _get_thd_freqs_on_this_cp_rank(rank, context, torch.empty(length // context), torch.arange(length))
            for length in lengths
        ]
        np.testing.assert_array_equal(positions[rank_tokens(lengths, context, rank)], torch.cat(expected))


@given(st.integers(1, 1000), st.integers(2, 8))
def test_padding_is_less_than_two_tokens_per_rank(length, context):
    assert 0 <= padded_length(length, context) - length < 2 * context
    assert padded_length(length, context) % (2 * context) == 0
    assert padded_length(length, 1) == length
