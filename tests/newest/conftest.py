# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the second lane: tests on the newest megatron-core, beside the installed release."""

import os
import subprocess
from pathlib import Path

import pytest

from megarl.parallel import mcore

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def newest() -> dict[str, str]:
    """Return the environment of a process that imports the newest release."""
    pinned = (ROOT / "requirements" / "mcore-newest.txt").read_text().split("==")[-1].strip()
    if mcore.release() == pinned:
        pytest.skip(f"megatron-core {pinned} is the one installed, and all other tests run on it")
    unpacked = subprocess.run(
        ["bash", "scripts/mcore.sh"], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert unpacked.returncode == 0, unpacked.stderr
    folder = unpacked.stdout.strip()
    path = os.pathsep.join(filter(None, [folder, str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
