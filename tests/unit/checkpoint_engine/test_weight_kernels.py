# SPDX-License-Identifier: Apache-2.0
"""The weight path's kernels, interpreted on the CPU; all that write base weights compile for a GPU."""

import pytest

from tests.helpers.interpreter import run_compiled, run_interpreted

pytest.importorskip("triton")


def test_digests_and_slots_are_those_of_the_references():
    run_interpreted("-m", "tests.helpers.weight_kernels")


def test_kernels_compile_for_a_gpu() -> None:
    assert run_compiled("writes") == ["ranges._sum_ranges", "slot._run"]
