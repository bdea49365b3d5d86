# SPDX-License-Identifier: Apache-2.0
"""Check that a killed controller leaves neither processes nor shared memory."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megarl.checkpoint_engine.transports.shm_folders import HIDDEN_SECONDS, ROOT, remove_stale

# A controller and, as its child, a trainer in the middle of a transfer by shared memory.
CONTROLLER = """
import subprocess, sys, time
from megarl.launch.reaper import reaper
with reaper():
    child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
    time.sleep(1000)
"""
SENDER = """
import os, time
from megarl.checkpoint_engine.transports.shm_folders import make_folder
folder, lock = make_folder()
(folder / "00000.data").write_bytes(bytes(2**20))
print(os.getpid(), folder, flush=True)
time.sleep(1000)
"""


def test_a_controller_killed_while_syncing_leaves_no_process_and_no_shared_memory() -> None:
    command = [sys.executable, "-c", CONTROLLER, SENDER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        pid, folder = controller.stdout.readline().split()
        sender = psutil.Process(int(pid))
        assert Path(folder).is_dir()
        time.sleep(5.0)  # the reaper looks every second, and takes long to start on a busy machine
        os.kill(controller.pid, signal.SIGKILL)
        deadline = time.monotonic() + 25
        while Path(folder).exists() or sender.is_running():
            assert time.monotonic() < deadline, "the sender or its folder outlived the controller"
            time.sleep(0.2)


CALLER = """
import subprocess, sys, time
import psutil
from megarl.launch.reaper import reaper
quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
theirs = subprocess.Popen(["sh", "-c", "sleep 0.5; sleep 300 & wait"], **quiet)
with reaper():
    ours = subprocess.Popen(["sleep", "300"], **quiet)
    time.sleep(float(sys.argv[1]))
status = ours.wait(20)
time.sleep(2)
left = psutil.Process(theirs.pid).children()
print(status, theirs.poll(), len(left))
for process in (*left, theirs):
    process.kill()
"""


@pytest.mark.parametrize("seconds", [0.0, 2.5])
def test_what_the_caller_started_before_and_what_that_starts_is_left_alone(seconds: float) -> None:
    done = subprocess.run([sys.executable, "-c", CALLER, str(seconds)], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["-9", "None", "1"], done.stderr


def test_a_folder_that_never_got_its_name_is_removed_once_it_is_old() -> None:
    young, old = (ROOT / f".megarl-{os.getuid()}-{os.getpid()}-{age}" for age in ("young", "old"))
    for folder in (young, old):
        folder.mkdir()
    try:
        past = time.time() - HIDDEN_SECONDS - 5
        os.utime(old, (past, past))
        assert old.name in remove_stale()
        assert young.is_dir() and not old.exists()
    finally:
        young.rmdir()
