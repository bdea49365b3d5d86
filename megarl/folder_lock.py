# SPDX-License-Identifier: Apache-2.0
"""Lock a folder for one process, such as the run folder of a training."""

import fcntl
import os
import socket
import time
from pathlib import Path

from megarl.errors import CheckpointError
from megarl.files import LOCK


class FolderLock:
    """Locks a folder for this process until ``release`` or its end; the kernel frees it however the process ends.

    Attributes:
        held: False on a file system without locks.
    """

    def __init__(self, folder: Path) -> None:
        """Take the lock.

        Args:
            folder: the folder; must exist.

        Raises:
            CheckpointError: another process holds the lock; the message names it.
            OSError: the lock file cannot be written.
        """
        self.folder = folder
        self._handle = (folder / LOCK).open("a+", encoding="utf-8")
        self.held = True
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._handle.seek(0)
            holder = self._handle.read().strip() or "another process"
            self._handle.close()
            raise CheckpointError(
                f"run folder '{folder}' is in use by {holder}; wait until it ends, or end it"
            ) from None
        except OSError:  # some Lustre and FUSE mounts
            self.held = False
            return
        self._handle.truncate(0)
        self._handle.write(
            f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S %z')}\n"
        )
        self._handle.flush()

    def check(self) -> None:
        """Check that the folder is still the one that was locked.

        Raises:
            CheckpointError: the folder was deleted, or replaced by another one.
        """
        locked_file = os.fstat(self._handle.fileno())
        try:
            there = os.stat(self.folder / LOCK)
        except OSError as error:
            raise CheckpointError(
                f"run folder '{self.folder}' is gone: it was deleted or moved while the run went on"
            ) from error
        if (locked_file.st_dev, locked_file.st_ino) != (there.st_dev, there.st_ino):
            raise CheckpointError(
                f"run folder '{self.folder}' is another one now: it was replaced while the run went on"
            )

    def release(self) -> None:
        """Release the lock. Safe to call twice."""
        self._handle.close()
