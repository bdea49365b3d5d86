# SPDX-License-Identifier: Apache-2.0
"""Test that a step's shown completions get the trainer's logprobs, and that pieces of tokens make up the text."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import ByteLevelBPETokenizer

from megarl.controller.rollouts.comparison import with_trainer_logprobs
from megarl.controller.rollouts.data import EncodedPrompt
from megarl.controller.rollouts.pieces import pieces_of
from megarl.controller.rollouts.rollout import Rollout
from megarl.run_folder import shown
from megarl.tasks.base import Reward
from megarl.types import Completion, Prompt, Trajectory

TEXTS = ["Größe 7 — naïve café, 東京の猫 🐈‍⬛ said: “3 + 4 = 7”", "plain words, plain words"]


def sequence(*ids, drawn=None):
    count = len(ids) if drawn is None else sum(drawn)
    return Completion(
        np.array([1, 2]), np.array(ids), np.zeros(count, np.float32) - 1, np.zeros(count, np.int64), "stop",
        None if drawn is None else np.array(drawn),
    )  # fmt: skip


def rollout(rewards):
    """Return two prompts of two samples; the first sample of the second prompt has two sequences, one with a hole."""
    prompts = [EncodedPrompt(Prompt(f"p{i}", ({"role": "user", "content": "q"},)), np.array([1, 2])) for i in range(2)]
    groups = [
        [Trajectory((sequence(5),)), Trajectory(())],
        [Trajectory((sequence(6, 7, 8, drawn=[True, False, True]), sequence(9))), Trajectory((sequence(10),))],
    ]
    texts = [[[str(one.response_ids) for one in each.sequences] for each in group] for group in groups]
    advantages = [[[0.0] * len(each.sequences) for each in group] for group in groups]
    given = [[Reward(value) for value in pair] for pair in (rewards[:2], rewards[2:])]
    return Rollout(prompts, groups, texts, given, advantages, [np.zeros(2)] * 2)


def test_the_completions_that_a_report_shows_are_compared_and_written(tmp_path):
    asked = []

    def trainer(samples):
        asked.extend(samples)
        return [np.full(int(sample.response_mask.sum()), -0.5 * len(asked)) for sample in samples]

    compared = with_trainer_logprobs(rollout([0.5, 0.0, 1.0, 0.2]), 3, trainer)
    # The rows are p0/0, p1/0/0, p1/0/1, p1/1, with rewards 0.5, 1, 1 and 0.2; p0/1 has no sequence.
    assert [sample.tokens.tolist() for sample in asked] == [[1, 2, 5], [1, 2, 6, 7, 8], [1, 2, 10]]
    assert asked[1].response_mask.tolist() == [False, False, True, False, True]
    compared.write(tmp_path / "rows.jsonl", lambda ids: "".join(f"<{token}>" for token in ids if token != 8))
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row.get("trainer_logprobs") for row in rows] == [[-1.5], None, [-1.5, -1.5], None, [-1.5]]
    assert [row.get("pieces") for row in rows] == [["<5>"], None, ["<6>", "<7>", ""], None, ["<10>"]]
    assert with_trainer_logprobs(compared, 0, None) is compared


def test_shown_are_the_first_and_the_extremes_then_others():
    assert shown([0.5, 0.4, 0.3, 0.9, 0.1, None], 4) == [0, 3, 4, 1]
    assert shown([None, None], 5) == [0, 1] and shown([], 3) == []


@pytest.fixture(scope="module")
def bpe():
    core = ByteLevelBPETokenizer()
    core.train_from_iterator(["plain words and more words"] * 20, vocab_size=280, min_frequency=2)
    return core


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(TEXTS) | st.text(max_size=40).filter(lambda text: "\ufffd" not in text))
def test_the_pieces_of_tokens_are_the_text_also_where_a_character_is_several_tokens(bpe, text):
    ids = np.array(bpe.encode(text).ids, dtype=np.int64)
    pieces = pieces_of(ids, lambda some: bpe.decode(some.tolist()))
    assert len(pieces) == len(ids) and "".join(pieces) == text


def test_a_text_that_ends_within_a_character_ends_so_in_pieces(bpe):
    ids = np.array(bpe.encode("a東").ids[:-1])
    pieces = pieces_of(ids, lambda some: bpe.decode(some.tolist()))
    assert "".join(pieces) == bpe.decode(ids.tolist()) and pieces[0] == "a"
