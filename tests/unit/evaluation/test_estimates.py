# SPDX-License-Identifier: Apache-2.0
"""Compare pass@k and maj@k with an enumeration of all subsets, and intervals with their promised coverage."""

from collections import Counter
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest

from megarl.evaluation.estimates import maj_at_k, pass_at_k
from megarl.evaluation.intervals import Estimate, average, share


def enumerated(values, k, judge):
    subsets = [judge([values[i] for i in chosen]) for chosen in combinations(range(len(values)), k)]
    return float(sum(subsets, Fraction(0)) / len(subsets))


def majority(pairs):
    """Return the rightness of the most frequent answer; of several, the mean."""
    votes = Counter(answer for answer, _ in pairs if answer)
    if not votes:
        return Fraction(0)
    winners = [answer for answer, count in votes.items() if count == max(votes.values())]
    return Fraction(sum(dict(pairs)[answer] for answer in winners), len(winners))


@pytest.mark.parametrize("seed", range(12))
def test_pass_and_maj_at_k_are_the_means_over_all_subsets(seed):
    draw = np.random.default_rng(seed)
    n = int(draw.integers(1, 9))
    answers = [str(a) if a else "" for a in draw.integers(0, 5, n)]
    truth = {str(a): int(draw.integers(0, 2)) for a in range(5)} | {"": 0}
    right = [truth[answer] for answer in answers]
    for k in range(1, n + 1):
        assert pass_at_k(np.array(right) > 0, k) == pytest.approx(enumerated(right, k, lambda c: Fraction(max(c))))
        pairs = list(zip(answers, right, strict=True))
        assert maj_at_k(answers, right, k) == pytest.approx(enumerated(pairs, k, majority)), (answers, right, k)


def test_maj_at_k_stays_exact_and_fast_for_many_samples():
    assert maj_at_k([str(i) for i in range(256)], [i == 7 for i in range(256)], 100) == pytest.approx(1 / 256)
    assert maj_at_k(["a"] * 130 + ["b"] * 126, [1.0] * 130 + [0.0] * 126, 256) == 1.0
    assert maj_at_k([""] * 4, [0.0] * 4, 2) == 0.0


@pytest.mark.parametrize(
    ("p", "prompts", "samples", "correlated"),
    [(0.02, 40, 1, False), (0.5, 30, 1, False), (0.9, 40, 4, True), (0.4, 30, 8, True), (0.3, 60, 8, False)],
)
def test_the_interval_of_a_share_covers_the_truth_about_as_often_as_it_says(p, prompts, samples, correlated):
    """Prompts differ in difficulty (a beta distribution of mean p), so completions of one are correlated."""
    draw, hits, tries = np.random.default_rng(0), 0, 600
    for _ in range(tries):
        difficulty = draw.beta(2 * p, 2 * (1 - p), prompts) if correlated else np.full(prompts, p)
        values = draw.binomial(samples, difficulty) / samples
        estimate = share(values, prompts * samples)
        assert 0.0 <= estimate.low <= estimate.value <= estimate.high <= 1.0
        hits += estimate.low <= p <= estimate.high
    assert 0.91 <= hits / tries <= 0.995


def test_the_interval_of_a_mean_covers_the_truth_about_as_often_as_it_says():
    draw, hits, tries = np.random.default_rng(1), 0, 300
    for _ in range(tries):
        estimate = average(draw.gamma(2.0, 3.0, 50))
        hits += estimate.low <= 6.0 <= estimate.high
    assert 0.89 <= hits / tries <= 0.98


def test_intervals_where_every_value_is_the_same():
    none_right = share(np.zeros(32), 128)
    assert (none_right.value, none_right.low) == (0.0, 0.0)
    # Wilson's upper limit for 0 of n is z^2 / (n + z^2).
    assert none_right.high == pytest.approx(1.959964**2 / (32 + 1.959964**2), rel=1e-6)
    half = share(np.full(8, 0.5), 32)
    assert 0.3 < half.low < 0.5 < half.high < 0.7
    assert average(np.array([2.0])) == Estimate(2.0)
    assert average(np.array([2.0, 2.0])) == Estimate(2.0, 2.0, 2.0)
    assert average(np.arange(9.0)) == average(np.arange(9.0))
    assert Estimate(0.5, 0.25, 0.75).text("{:.2f}") == "0.50 [0.25, 0.75]"
