# SPDX-License-Identifier: Apache-2.0
"""Test token weights: each mode's definition, and that they do not depend on how the step is cut."""

import numpy as np
import pytest

from megarl.errors import LossInputError
from megarl.loss import sequence_weights

COUNTS = np.array([4, 1, 0, 5])


def test_token_mean_weighs_every_token_the_same() -> None:
    np.testing.assert_allclose(sequence_weights(COUNTS, "token_mean", 8), [0.1, 0.1, 0.0, 0.1])


def test_sequence_mean_weighs_every_sequence_the_same_and_counts_empty_ones() -> None:
    weights = sequence_weights(COUNTS, "sequence_mean", 8)
    np.testing.assert_allclose(weights * COUNTS, [0.25, 0.25, 0.0, 0.25])


def test_constant_does_not_depend_on_lengths() -> None:
    np.testing.assert_allclose(sequence_weights(COUNTS, "constant", 8), [1 / 32, 1 / 32, 0.0, 1 / 32])


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_a_step_without_response_tokens_has_zero_weights(aggregation: str) -> None:
    weights = sequence_weights(np.zeros(3, dtype=np.int64), aggregation, 8)  # type: ignore[arg-type]
    assert weights.dtype == np.float64
    assert (weights == 0.0).all()


@pytest.mark.parametrize(
    ("counts", "aggregation", "longest", "message"),
    [
        (np.array([1, -1]), "token_mean", 8, "holds -1"),
        (np.array([1.0]), "token_mean", 8, "dtype float64"),
        (np.array([[1]]), "token_mean", 8, r"shape \(1, 1\)"),
        (np.array([], dtype=np.int64), "token_mean", 8, r"shape \(0,\)"),
        (np.array([1]), "constant", 0, "max_response_tokens is 0"),
        (np.array([1]), "mean", 8, "loss.aggregation is 'mean'"),
    ],
)
def test_wrong_counts_are_refused_by_name(counts: np.ndarray, aggregation: str, longest: int, message: str) -> None:
    with pytest.raises(LossInputError, match=message):
        sequence_weights(counts, aggregation, longest)  # type: ignore[arg-type]
