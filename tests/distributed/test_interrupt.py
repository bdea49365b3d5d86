# SPDX-License-Identifier: Apache-2.0
"""Leave no rank behind when `megarl verify` ends, however it ends: a rank would keep its GPU."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.helpers.models import make_model


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 130), pytest.param(signal.SIGKILL, -signal.SIGKILL, marks=pytest.mark.long)]
)
def test_ranks_end_with_the_command(tmp_path, number, code):
    model, log = make_model(tmp_path / "model", "llama", tied=False), tmp_path / "log"
    with log.open("w") as handle:
        process = subprocess.Popen(
            [sys.executable, "-m", "megarl.cli.main", "verify", model, "parallel.data=2", "train.steps=1000"],
            stderr=handle,
        )
    started: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 400
        while "update 1 of" not in log.read_text():  # a process that run_ranks started reports this
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        started = psutil.Process(process.pid).children(recursive=True)
        assert len(started) >= 2  # the fork server and the reference
        process.send_signal(number)
        assert process.wait(10) == code
        assert psutil.wait_procs(started, timeout=10)[1] == []
    finally:
        process.kill()
        for child in started:
            if child.is_running():
                child.kill()
