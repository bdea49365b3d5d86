# SPDX-License-Identifier: Apache-2.0
"""Kernels of layers, run by Triton's interpreter, give what torch does in float64; all of them compile for a GPU."""

from pathlib import Path

import pytest

from megarl.model.layers import kernels
from tests.helpers.interpreter import run_compiled, run_interpreted

pytest.importorskip("triton")


def test_outputs_and_gradients_equal_torch() -> None:
    run_interpreted("-m", "tests.helpers.row_kernels")


def test_compiled_layers_call_the_kernels() -> None:
    run_interpreted("-m", "tests.helpers.traced_kernels")


def test_updates_left_to_kernels_are_added() -> None:
    run_interpreted("-m", "tests.helpers.update_kernels")


def test_updates_of_all_experts_are_added() -> None:
    run_interpreted("-m", "tests.helpers.grouped_kernels")


def test_kernels_compile_for_a_gpu() -> None:
    files = {name.partition(".")[0] for name in run_compiled("layers")}
    folder = Path(kernels.__file__).parent
    # Without a kernel of their own.
    others = {"__init__", "low_rank", "ops", "rows"}
    assert files - {"softmax"} == {file.stem for file in folder.glob("*.py")} - others
