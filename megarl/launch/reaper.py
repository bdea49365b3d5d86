"""Ends what a run started even if the run itself is killed with -9.

Ray's own processes mostly die with the driver, but two agents of the raylet survive its SIGKILL (Ray 2.60). The reaper
is a small process that remembers the run's descendants, and kills those that are still there once the run is gone. Then
it removes the shared memory of a weight transfer that was cut short.
"""

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil

from megarl.checkpoint_engine.shm_folders import remove_stale

LOOK_SECONDS = 1.0
GRACE_SECONDS = 5.0


@contextlib.contextmanager
def reaper() -> Iterator[None]:
    """Watch this process's descendants until the block ends or this process dies."""
    # A session of its own: Ctrl-C on the terminal must not reach it.
    process = subprocess.Popen(
        [sys.executable, "-m", "megarl.launch.reaper", str(os.getpid())], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        yield
    finally:
        if process.stdin:
            process.stdin.close()


def watch(parent: psutil.Process) -> None:
    """Remember descendants until standard input closes, which it does when the parent dies; then end them."""
    family: set[psutil.Process] = set()
    own = psutil.Process()
    while not select.select([sys.stdin], [], [], LOOK_SECONDS)[0]:
        with contextlib.suppress(psutil.NoSuchProcess):
            family |= set(parent.children(recursive=True)) - {own}
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline and any(process.is_running() for process in family):
        time.sleep(0.2)
    for process in family:
        # is_running compares the start time too: a pid that was given to another process is left alone.
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running():
                process.kill()
    psutil.wait_procs(family, timeout=GRACE_SECONDS)
    remove_stale()


if __name__ == "__main__":
    watch(psutil.Process(int(sys.argv[1])))
