# SPDX-License-Identifier: Apache-2.0
"""Folders of shared memory whose owner can be seen to be alive. No torch: the reaper removes those of the dead, too.

A folder's lock is held (flock) for as long as the sender lives. Folders whose lock is free belong to dead processes:
the end of a run and the start of the next transfer remove them.
"""

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

ROOT = Path("/dev/shm")
# Between making a folder and giving it its name pass microseconds.
HIDDEN_SECONDS = 60.0


def remove_stale() -> list[str]:
    """Remove what dead senders of this user left behind; return the folders' names."""
    stale = [folder for folder in ROOT.glob(f"megarl-{os.getuid()}-*") if not is_locked(folder)]
    stale += [folder for folder in ROOT.glob(f".megarl-{os.getuid()}-*") if _is_old(folder)]
    for folder in stale:
        shutil.rmtree(folder, ignore_errors=True)
    return [folder.name for folder in stale]


def _is_old(folder: Path) -> bool:
    """Whether a folder that never got its name cannot be one that is just being made."""
    try:
        return time.time() - folder.stat().st_mtime > HIDDEN_SECONDS
    except OSError:
        return False


def make_folder() -> tuple[Path, int]:
    """Make a locked folder; return it and the lock's descriptor."""
    name = f"megarl-{os.getuid()}-{os.getpid()}-"
    # The name becomes visible to ``remove_stale`` only once the lock is held.
    hidden = Path(tempfile.mkdtemp(prefix=f".{name}", dir=ROOT))
    lock = os.open(hidden / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return hidden.rename(ROOT / hidden.name[1:]), lock


def is_locked(folder: Path) -> bool:
    """Whether the folder's sender is alive."""
    try:
        descriptor = os.open(folder / "lock", os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
