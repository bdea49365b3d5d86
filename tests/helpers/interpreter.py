# SPDX-License-Identifier: Apache-2.0
"""Run programs whose Triton kernels are interpreted on the CPU."""

import os
import subprocess
import sys


def run_interpreted(*program: str) -> None:
    """Run `python *program` in another process, because Triton decides on import whether it interprets."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", *program],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr[-3000:]
