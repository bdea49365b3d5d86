# SPDX-License-Identifier: Apache-2.0
"""The weight path's kernels, interpreted on the CPU; tests/gpu compiles them."""

import pytest

from tests.helpers.interpreter import run_interpreted

pytest.importorskip("triton")


def test_digests_and_slots_are_those_of_the_references():
    run_interpreted("-m", "tests.helpers.weight_kernels")
