# SPDX-License-Identifier: Apache-2.0
"""Scores of long completions, against DAPO's equation 13 written out."""

import numpy as np
import pytest

from megarl.config import LossConfig, parse_config
from megarl.controller.rollouts.rewarding.length_penalty import trained_scores
from megarl.errors import ConfigError
from megarl.types import Completion, Trajectory

LIMIT, CACHE = 20, 5
SCORES = np.array([1.0, 0.0, 1.0, 1.0, -2.0])


def completions():
    """Of 1, 15, 16, 19 and 20 tokens; the last is truncated."""
    found = []
    for size in (1, 15, 16, 19, 20):
        ids = np.arange(size)
        reason = "length" if size == LIMIT else "stop"
        drawn = Completion(np.arange(2), ids, np.zeros(size, np.float32), np.zeros(size, np.int64), reason)
        found.append(Trajectory((drawn,), reason))
    return found


def dapo(length):
    """Equation 13, as printed."""
    if length <= LIMIT - CACHE:
        return 0.0
    if length <= LIMIT:
        return ((LIMIT - CACHE) - length) / CACHE
    return -1.0


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_long_completions_lose_what_dapos_equation_says(factor):
    config = LossConfig(truncated="penalise", overlong_tokens=CACHE, overlong_penalty=factor)
    expected = [score + factor * dapo(size) for score, size in zip(SCORES, (1, 15, 16, 19, 20), strict=True)]
    assert trained_scores(SCORES, completions(), config, LIMIT) == pytest.approx(expected)


def test_a_truncated_completion_counts_as_zero_or_as_it_is():
    zero = trained_scores(SCORES, completions(), LossConfig(truncated="zero"), LIMIT)
    assert zero.tolist() == [1.0, 0.0, 1.0, 1.0, 0.0]
    assert trained_scores(SCORES, completions(), LossConfig(), LIMIT) is SCORES


def test_a_penalty_over_more_tokens_than_a_response_has_is_refused():
    tree = {"model": {"path": "m"}, "task": {"name": "arithmetic"}, "sampler": {"max_response_tokens": 64}}
    with pytest.raises(ConfigError, match=r"loss\.overlong_tokens \(128\) must be at most sampler"):
        parse_config(tree | {"loss": {"truncated": "penalise"}})
