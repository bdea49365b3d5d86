"""Folders that appear whole or not at all, whatever kills the writer, and the thread that writes them.

Imports no torch: the controller uses it too.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from megarl.errors import CheckpointError

LOCK = ".lock"
LOCK_SECONDS = 300.0
HIDDEN = ".{}.partial"


def publish(target: Path, fill: Callable[[Path], None]) -> None:
    """Fill a hidden folder beside ``target``, force all of it to disk, and give it the name by one rename.

    What killed writers left beside it is removed first, under a lock that every ``publish`` into the same parent
    takes: a folder that is still being written is never touched.

    Args:
        target: must not exist; its parent must.
        fill: writes into the folder it is given. When it raises, nothing is left.

    Raises:
        CheckpointError: another process has been writing beside it for ``LOCK_SECONDS``.
        OSError: the folder cannot be written.
    """
    with _only_writer(target.parent) as alone:
        for left in target.parent.glob(HIDDEN.format("*")) if alone else ():
            shutil.rmtree(left, ignore_errors=True)
        partial = target.with_name(HIDDEN.format(target.name))
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir()
            fill(partial)
            for path in (*partial.rglob("*"), partial):
                _flush(path)
            partial.rename(target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        _flush(target.parent)


def discard(folder: Path) -> None:
    """Remove a folder that ``publish`` made; killed half way, it leaves nothing under the folder's name."""
    hidden = folder.with_name(HIDDEN.format(folder.name))
    shutil.rmtree(hidden, ignore_errors=True)
    folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _flush(path: Path) -> None:
    """Force a file, or the entries of a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _only_writer(folder: Path) -> Iterator[bool]:
    """Hold the folder's lock; the kernel frees it however this process ends. False where it cannot be locked."""
    with (folder / LOCK).open("a") as handle:
        locked = _lock(handle, folder)
        try:
            yield locked
        finally:
            if locked:
                # Not by closing alone: a process forked meanwhile would go on holding it.
                fcntl.flock(handle, fcntl.LOCK_UN)


def _lock(handle: IO[str], folder: Path) -> bool:
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"another process has been saving into '{folder}' for {LOCK_SECONDS:.0f} s (it holds {LOCK}); "
                    "give each run its own folder"
                ) from error
            time.sleep(0.05)
        except OSError:  # a file system without locks: some Lustre and FUSE mounts
            return False


class BackgroundWriter:
    """Runs one job at a time on a thread. A job's failure is logged at once and raised by the next call.

    The thread is not a daemon: a process that ends in the ordinary way waits for it.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Wait for the job before, then start this one.

        Raises:
            Exception: what the job before raised; this one is not started.
        """
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(job,), name="megarl-writer")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the running job, if any.

        Raises:
            Exception: what it raised; only once.
        """
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            # Logged too: nobody may ever call again.
            logging.getLogger(__name__).error("%s", error)
            self._failure = error
