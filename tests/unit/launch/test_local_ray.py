# SPDX-License-Identifier: Apache-2.0
"""Check that nobody else can reach the Ray of a run on one host, and that nothing of it is left."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.traced import ROOT, Traced


@pytest.mark.parametrize("first", ["in time", "late"])
def test_it_listens_on_loopback_under_a_token_of_its_own_and_a_killed_run_leaves_nothing(
    traced: Traced, tmp_path: Path, first: str
) -> None:
    environment = traced.environment | {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "tests.unit.launch.local_ray", first]
    run = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdout and run.stderr
    try:
        line = run.stdout.readline()
        assert line, run.stderr.read().decode()[-2000:]
        said = json.loads(line)
        assert said["node"] == "127.0.0.1"
        assert {address.removeprefix("::ffff:") for address in said["listening"]} == {"127.0.0.1"}
        # Ray writes a token that others can read, unless it is given one.
        assert not (tmp_path / ".ray").exists()
        scratch = Path(said["scratch"])
        assert said["sockets"] and scratch.stat().st_mode & 0o777 == 0o700
    finally:
        run.kill()
        _, logged = run.communicate()
    assert (b"is started again: the node is late" in logged) is (first == "late")
    assert traced.wait_until_gone(20) == []
    deadline = time.monotonic() + 5
    while scratch.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not scratch.exists()
