# SPDX-License-Identifier: Apache-2.0
"""Run programs whose Triton kernels are interpreted on the CPU."""

import os
import subprocess
import sys
from typing import Any


def run_interpreted(*program: str) -> None:
    """Run `python *program` in another process, because Triton decides on import whether it interprets."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", *program],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-3000:]


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
