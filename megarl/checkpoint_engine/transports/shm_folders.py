# SPDX-License-Identifier: Apache-2.0
"""Make folders of shared memory that tell whether their owner lives. No torch: the reaper uses this module too.

The sender holds a folder's lock (flock) as long as it lives. A folder whose lock is free belongs to a dead process. The
end of a run and the start of the next transfer remove such folders.
"""

import fcntl
import mmap
import os
import shutil
import tempfile
import time
from pathlib import Path

from megarl.errors import WeightSyncError

ROOT = Path("/dev/shm")
# A folder gets its name microseconds after it is made. One that is hidden for longer has a dead owner.
HIDDEN_SECONDS = 60.0


def remove_stale() -> list[str]:
    """Remove what this user's dead senders left behind; return the names of the folders."""
    stale = [folder for folder in ROOT.glob(f"megarl-{os.getuid()}-*") if not is_locked(folder)]
    stale += [folder for folder in ROOT.glob(f".megarl-{os.getuid()}-*") if _is_old(folder)]
    for folder in stale:
        shutil.rmtree(folder, ignore_errors=True)
    return [folder.name for folder in stale]


def _is_old(folder: Path) -> bool:
    """Return True if a folder without its final name is too old to be one that is just being made."""
    try:
        return time.time() - folder.stat().st_mtime > HIDDEN_SECONDS
    except OSError:
        return False


def make_folder() -> tuple[Path, int]:
    """Make a locked folder; return it and the lock's descriptor."""
    name = f"megarl-{os.getuid()}-{os.getpid()}-"
    # ``remove_stale`` sees the folder only when its lock is held.
    hidden = Path(tempfile.mkdtemp(prefix=f".{name}", dir=ROOT))
    lock = os.open(hidden / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return hidden.rename(ROOT / hidden.name[1:]), lock


def map_new_file(path: Path, nbytes: int) -> mmap.mmap:
    """Make a file of ``nbytes`` in a folder, and map it.

    Raises:
        WeightSyncError: there is no room for it.
    """
    with open(path, "w+b") as file:
        try:
            # Reserve the pages. Otherwise a full /dev/shm kills the process with SIGBUS at the first write.
            os.posix_fallocate(file.fileno(), 0, nbytes)
        except OSError as error:
            free = shutil.disk_usage(ROOT).free
            raise WeightSyncError(
                f"{ROOT} cannot hold a bucket of {nbytes / 2**20:.1f} MiB ({free / 2**20:.1f} MiB free): {error}; "
                "lower checkpoint_engine.bucket_mib or give the container a larger /dev/shm"
            ) from error
        return mmap.mmap(file.fileno(), nbytes)


def is_locked(folder: Path) -> bool:
    """Return True if the folder's sender is alive."""
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
