# SPDX-License-Identifier: Apache-2.0
"""Run programs whose Triton kernels are interpreted on the CPU, or compiled there for a GPU."""

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


def run_interpreted(*program: str) -> None:
    """Run `python *program` in another process, because Triton decides on import whether it interprets."""
    _run(program, {"TRITON_INTERPRET": "1"})


def run_compiled(what: str) -> list[str]:
    """Compile kernels (``compiled_kernels``) in another process; return their names."""
    return _run(["-m", "tests.helpers.compiled_kernels", what], {}).split()


def _run(program: Sequence[str], environment: dict[str, str]) -> str:
    command = [sys.executable, "-W", "ignore", *program]
    run = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


def sum_in_order() -> None:
    """Make the interpreter's dot product add the terms one by one, as the GPU's instruction does for every row alike.

    NumPy's product depends on the processor: OpenBLAS's kernels for AMD's Zen give a row other bits in another place.
    Call it in the process that interprets.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def dot(builder: Any, a: Any, b: Any, total: Any, *options: Any) -> Any:
        sums = total.data.copy()
        for left, right in zip(a.data.T.astype(sums.dtype), b.data.astype(sums.dtype), strict=True):
            sums += left[:, None] * right
        return TensorHandle(sums, total.dtype.scalar)

    InterpreterBuilder.create_dot = dot
