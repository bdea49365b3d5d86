# SPDX-License-Identifier: Apache-2.0
"""Estimate pass@k and maj@k of one prompt from n >= k completions, without drawing subsets."""

from collections import Counter
from collections.abc import Sequence
from math import comb

import numpy as np


def pass_at_k(right: Sequence[bool] | np.ndarray, k: int) -> float:
    """Return the chance that a random k of the completions hold a right one.

    This is the unbiased estimator of Chen et al. 2021 (Codex, arXiv:2107.03374, equation 1): 1 - C(n - c, k) / C(n, k)
    for c right ones among n.

    Args:
        right: bool ``[n]``.
        k: 1 <= k <= n.
    """
    count, hits = len(right), int(np.sum(right))
    return 1.0 - comb(count - hits, k) / comb(count, k)


def maj_at_k(answers: Sequence[str], right: Sequence[float] | np.ndarray, k: int) -> float:
    """Return the chance that the majority's answer among a random k of the completions is right.

    It is the mean over all subsets of k (self-consistency, Wang et al. 2022, arXiv:2203.11171), with ties broken at
    random. An empty answer does not vote; a subset without votes is wrong.

    Args:
        answers: the answer of each completion, ``[n]``.
        right: of each completion, 0 to 1, ``[n]``; completions with one answer count with their mean.
        k: 1 <= k <= n.
    """
    votes = Counter(answer for answer in answers if answer)
    silent = len(answers) - sum(votes.values())
    hits: Counter[str] = Counter()
    for answer, value in zip(answers, right, strict=True):
        hits[answer] += float(value)  # type: ignore[assignment]
    # Answers with equally many votes have equal chances.
    wins = {count: _wins(count, sorted((votes - Counter({answer: count})).values()), silent, k)
            for answer, count in votes.items()}  # fmt: skip
    return sum(wins[count] * hits[answer] / count for answer, count in votes.items()) / comb(len(answers), k)


def _wins(count: int, others: Sequence[int], silent: int, k: int) -> float:
    """Count the subsets of k in which an answer wins; a tie of t answers counts 1/t.

    Args:
        count: completions with the answer.
        others: completions with each other answer.
        silent: completions without an answer.
        k: size of the subsets.
    """
    total = 0.0
    for votes in range(1, min(count, k) + 1):
        rest = k - votes
        # ways[t, s]: choices of s of the others' completions in which t other answers have as many votes, none more.
        ways = np.zeros((rest // votes + 1, rest + 1))
        ways[0] = [comb(silent, size) for size in range(rest + 1)]
        for other in others:
            more = np.zeros_like(ways)
            for fewer in range(min(votes, other + 1, rest + 1)):
                more[:, fewer:] += comb(other, fewer) * ways[:, : rest + 1 - fewer]
            if other >= votes and rest >= votes:
                more[1:, votes:] += comb(other, votes) * ways[:-1, : rest + 1 - votes]
            ways = more
        total += comb(count, votes) * float(np.sum(ways[:, rest] / np.arange(1, len(ways) + 1)))
    return total
