# SPDX-License-Identifier: Apache-2.0
"""Free a model that is dropped, and with it its process groups."""

import os
import subprocess
import sys
from pathlib import Path

# Variables that the program inherits; others may have been set by other tests.
KEPT = ("PATH", "HOME", "TMPDIR", "PYTHONPATH", "OMP_NUM_THREADS")


def test_nothing_is_left_of_a_model(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.freed", str(tmp_path), "qwen3", "qwen3_moe"],
        cwd=Path(__file__).parents[2],
        env={name: os.environ[name] for name in KEPT if name in os.environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
