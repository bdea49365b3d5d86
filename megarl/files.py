# SPDX-License-Identifier: Apache-2.0
"""Files and folders that appear whole or not at all, whatever kills the writer; locks; paths as users write them.

Imports no torch: config and controller use it too.
"""

import contextlib
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from megarl.errors import CheckpointError, ConfigError, MegarlError

LOCK = ".lock"
LOCK_SECONDS = 300.0
HIDDEN = ".{}.partial"
# Characters of a wrong path that are quoted.
SHOWN = 80


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
            _flush_all(partial)
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


def _flush_all(folder: Path) -> None:
    """Force a folder and all that is in it to disk, so that no crash after a rename leaves it empty."""
    for path in (*folder.rglob("*"), folder):
        _flush(path)


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


@contextlib.contextmanager
def write_directory(target: Path) -> Iterator[Path]:
    """Yield an empty directory that becomes ``target`` when the block ends well, by a rename; else nothing is left.

    An old directory there is removed only once the new one has its place.
    """
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        _flush_all(partial)
        if target.exists():
            target.rename(old)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def write_text(file: Path, text: str) -> None:
    """Put a text file in place, as ``replacing``."""
    with replacing(file) as handle:
        handle.write(text)


@contextlib.contextmanager
def replacing(file: Path) -> Iterator[IO[str]]:
    """Yield a text file that takes ``file``'s place when the block ends well, by one rename once it is on disk.

    A failure leaves the old one as it was.

    Raises:
        OSError: it cannot be written.
    """
    partial = file.with_name(HIDDEN.format(file.name))
    try:
        with partial.open("w", encoding="utf-8") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        partial.rename(file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read_json(file: Path, where: str, error: type[MegarlError]) -> dict[str, Any]:
    """The object in a JSON file.

    Args:
        file: to read.
        where: what the message starts with: the setting or folder that names the file.
        error: class to raise.

    Raises:
        MegarlError: of the class ``error``: the file is missing, or is no JSON object.
    """
    try:
        parsed = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as cause:
        raise error(f"{where}: {file} does not exist") from cause
    except (OSError, ValueError, RecursionError) as cause:
        raise error(f"{where}: {file} cannot be read as JSON ({cause})") from cause
    if not isinstance(parsed, dict):
        raise error(f"{where}: {file} holds no JSON object")
    return parsed


def append_line(file: Path, line: str) -> None:
    """Add a line to a file, all of it or nothing, and force it to disk. The file is made where its folder exists.

    Raises:
        OSError: it cannot be written; the file ends as it did before.
    """
    with file.open("ab", buffering=0) as handle:
        before = os.fstat(handle.fileno()).st_size
        try:
            data = memoryview(f"{line}\n".encode())
            while data:  # a full disk takes a part first
                data = data[handle.write(data) :]
            os.fsync(handle.fileno())
        except BaseException:
            os.ftruncate(handle.fileno(), before)
            raise


@contextlib.contextmanager
def writing(file: Path, error: type[MegarlError] = CheckpointError) -> Iterator[None]:
    """Say by name what the block could not write.

    Raises:
        MegarlError: of the class ``error``, in place of an OSError.
    """
    try:
        yield
    except OSError as cause:
        raise error(f"'{file}' cannot be written: {cause.strerror or cause}") from cause


def user_path(field: str, value: str | Path) -> Path:
    """A path that a user wrote, absolute, with ``~`` replaced; it need not exist.

    Args:
        field: dotted name of the setting, or of the option, for the message.
        value: the path.

    Raises:
        ConfigError: no file can have this path: an unknown ``~user``, a name too long, a zero byte, no permission.
    """
    try:
        path = Path(value).expanduser().absolute()
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return path
    except (OSError, ValueError, RuntimeError) as error:
        cause = error.strerror if isinstance(error, OSError) else str(error)
        text = str(value) if len(str(value)) <= SHOWN else f"{str(value)[:SHOWN]}..."
        raise ConfigError(f"{field} is {text!r}, which cannot be a path: {cause}") from error
    return path


def find_file(field: str, value: str, folder: Path | None = None) -> Path:
    """The absolute path of an existing file that a user named.

    Args:
        field: dotted name of the setting, for the message.
        value: the path; a relative one is looked up in ``folder`` first, then in the current folder.
        folder: of the recipe.

    Raises:
        ConfigError: no such file.
    """
    given = user_path(field, value)
    relative = folder is not None and not value.startswith(("~", "/"))
    places = [folder / value, given] if folder is not None and relative else [given]
    for place in places:
        if place.is_file():
            return place.resolve()
    looked = " or ".join(str(place) for place in dict.fromkeys(places))
    raise ConfigError(f"{field} is '{value}', but there is no file {looked}")


class FolderLock:
    """Holds a folder for this process alone, until it ends or ``release``; the kernel frees it however it ends.

    Attributes:
        held: False on a file system without locks.
    """

    def __init__(self, folder: Path) -> None:
        """Take the lock.

        Args:
            folder: exists.

        Raises:
            CheckpointError: another process has it; names that process.
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
        """Find out whether the folder is still there.

        Raises:
            CheckpointError: it was deleted, or replaced by another one.
        """
        own = os.fstat(self._handle.fileno())
        try:
            there = os.stat(self.folder / LOCK)
        except OSError as error:
            raise CheckpointError(
                f"run folder '{self.folder}' is gone: it was deleted or moved while the run went on"
            ) from error
        if (own.st_dev, own.st_ino) != (there.st_dev, there.st_ino):
            raise CheckpointError(
                f"run folder '{self.folder}' is another one now: it was replaced while the run went on"
            )

    def release(self) -> None:
        """Let others have the folder; safe to call twice."""
        self._handle.close()
