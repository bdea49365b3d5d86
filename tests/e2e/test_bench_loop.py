# SPDX-License-Identifier: Apache-2.0
"""Run `megarl bench loop` as a user does: real ranks, a real engine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.train_run import ROOT


@pytest.mark.long
def test_a_tiny_model_trains_in_turns_and_side_by_side(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megarl.cli.main", "bench", "loop", "tiny", "dtype=float32", "--out", tmp_path]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    for way, steps in (("turns", 1 + 2), ("side", 1 + 3 + 2 + 2)):
        result = report["ways"][way]
        assert [row["step"] for row in result["steps"]] == list(range(1, steps + 1))
        assert 0 < result["phase_seconds"]["train"] < result["step_seconds"] < result["start_seconds"]
        assert list((tmp_path / f"loop-{way}" / "logs").glob("*.log"))
    assert report["ways"]["turns"]["mismatch_max"] < 1e-5  # side by side it is that of versions too
