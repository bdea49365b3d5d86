# SPDX-License-Identifier: Apache-2.0
"""Compare the kernels of `numerics: bitwise`, run by Triton's interpreter, with torch in float64."""

import pytest

from tests.helpers.interpreter import run_interpreted

pytest.importorskip("triton")


def test_results_equal_torch_and_do_not_depend_on_the_batch() -> None:
    run_interpreted("-m", "tests.helpers.bitwise_kernels")


def test_operations_follow_torchs_rules_and_their_gradients_are_exact() -> None:
    run_interpreted("-m", "tests.helpers.bitwise_ops")


def test_a_bitwise_model_equals_the_fast_one() -> None:
    run_interpreted("-m", "tests.helpers.bitwise_layers")


@pytest.mark.long
def test_one_fast_operation_on_one_side_is_noticed() -> None:
    """The same on a GPU: tests/gpu/test_bitwise.py."""
    run_interpreted("-m", "tests.helpers.bitwise_swaps")
