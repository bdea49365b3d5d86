# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the second lane: tests on the newest megatron-core, beside the installed release."""

import os
import subprocess
from pathlib import Path

import pytest

from megarl.parallel import mcore

ROOT = Path(__file__).parents[2]
PINNED = (ROOT / "requirements" / "mcore-newest.txt").read_text().split("==")[-1].strip()


@pytest.fixture(scope="session")
def newest(newest_or_installed: dict[str, str]) -> dict[str, str]:
    """Return the environment of a process that imports the newest release. Skip if that is the installed one."""
    if mcore.release() == PINNED:
        pytest.skip(f"megatron-core {PINNED} is the one installed, and all other tests run on it")
    return newest_or_installed


@pytest.fixture(scope="session")
def newest_or_installed() -> dict[str, str]:
    """Return the environment of a process that imports the newest release, beside the installed one if need be."""
    path = [str(ROOT), os.environ.get("PYTHONPATH")]
    if mcore.release() != PINNED:
        unpacked = subprocess.run(
            ["bash", "scripts/mcore.sh"], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
        )
        assert unpacked.returncode == 0, unpacked.stderr
        path.insert(0, unpacked.stdout.strip())
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), "OMP_NUM_THREADS": "1"}
