# SPDX-License-Identifier: Apache-2.0
"""Compare the row kernels (SwiGLU, sums of rows, RMSNorm), run by Triton's interpreter, with torch in float64."""

import pytest

from tests.helpers.interpreter import run_interpreted

pytest.importorskip("triton")


def test_outputs_and_gradients_equal_torch() -> None:
    run_interpreted("-m", "tests.helpers.row_kernels")


def test_compiled_layers_call_the_kernels() -> None:
    run_interpreted("-m", "tests.helpers.traced_kernels")


def test_updates_left_to_kernels_are_added() -> None:
    run_interpreted("-m", "tests.helpers.update_kernels")
