# SPDX-License-Identifier: Apache-2.0
"""End the processes of a run and remove its scratch folder, even if the run itself is killed with -9.

Ray's processes mostly die with the driver, but two agents of the raylet survive its SIGKILL (Ray 2.60). The reaper is a
small process that remembers the run's descendants, and kills those that are left when the run is gone. Then it removes
the shared memory of an interrupted weight transfer.
"""

import contextlib
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from megarl.checkpoint_engine.transports.shm_folders import remove_stale

LOOK_SECONDS = 1.0
# Asks the reaper for another look, and the seconds in which it has one even if it has only just been started.
LOOK, START_SECONDS = b"?", 20.0
GRACE_SECONDS = 5.0
# Ray's sockets are some 80 characters below the scratch folder, and a socket's path has at most 107.
LONGEST = 12


@contextlib.contextmanager
def reaper() -> Iterator[Path]:
    """Watch this process's descendants until the block ends or this process dies.

    Processes that are there already, and their descendants, are the caller's own.

    Yields:
        A scratch folder for sockets, logs and the like. It is removed at the end.
    """
    place = tempfile.gettempdir()
    scratch = Path(tempfile.mkdtemp(prefix="megarl-", dir=place if len(place) <= LONGEST else "/tmp"))
    # A session of its own, so that Ctrl-C on the terminal does not reach it.
    theirs = [str(process.pid) for process in psutil.Process().children(recursive=True)]
    command = [sys.executable, "-m", "megarl.launch.reaper", str(os.getpid()), str(scratch), *theirs]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
    )
    try:
        yield scratch
    finally:
        _let_look(process)
        shutil.rmtree(scratch, ignore_errors=True)


def _let_look(process: subprocess.Popen) -> None:
    """Let the reaper look once more before the block ends: a block may be short, and the reaper slow to start."""
    assert process.stdin is not None and process.stdout is not None
    with process.stdin, process.stdout, contextlib.suppress(OSError):
        process.stdin.write(LOOK)
        if select.select([process.stdout], [], [], START_SECONDS)[0]:
            process.stdout.read(1)


def watch(parent: psutil.Process, others: Iterable[int]) -> None:
    """Remember descendants until standard input closes (which happens when the parent dies), then end them.

    A byte from standard input is written to standard output after another look.

    Args:
        parent: the process that runs the training.
        others: descendants of it that were there before; they and what they start are left alone.
    """
    family: set[psutil.Process] = set()
    left = _living(others) | {psutil.Process()}
    asked = None
    while asked != b"":
        left |= {process for one in left for process in _descendants(one)}
        family |= _descendants(parent) - left
        if asked:
            with contextlib.suppress(OSError):  # the parent is gone
                os.write(1, asked)
        asked = os.read(0, 1) if select.select([0], [], [], LOOK_SECONDS)[0] else None
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline and any(process.is_running() for process in family):
        time.sleep(0.2)
    for process in family:
        # is_running also compares the start time, so a pid that now belongs to another process is left alone.
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running():
                process.kill()
    psutil.wait_procs(family, timeout=GRACE_SECONDS)
    remove_stale()


def _descendants(process: psutil.Process) -> set[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return set(process.children(recursive=True))
    return set()


def _living(pids: Iterable[int]) -> set[psutil.Process]:
    found: set[psutil.Process] = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.add(psutil.Process(pid))
    return found


if __name__ == "__main__":
    watch(psutil.Process(int(sys.argv[1])), map(int, sys.argv[3:]))
    shutil.rmtree(sys.argv[2], ignore_errors=True)
