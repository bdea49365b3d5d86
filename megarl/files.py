# SPDX-License-Identifier: Apache-2.0
"""Write files and folders atomically, read JSON, resolve the user's paths.

Files and folders appear complete or not at all, however the writer ends. Imports no torch, because config and
controller use this module too.
"""

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from megarl.errors import CheckpointError, ConfigError, MegarlError

LOCK = ".lock"
LOCK_SECONDS = 300.0
HIDDEN = ".{}.partial"
# Number of characters of a wrong path that a message quotes.
SHOWN = 80


def publish(target: Path, fill: Callable[[Path], None]) -> None:
    """Fill a hidden folder beside ``target``, flush it to disk, and rename it to ``target``.

    What killed writers left beside it is removed first, under a lock that every ``publish`` into the same parent takes.
    A folder that is still being written is never touched.

    Args:
        target: the folder to make; must not exist. Its parent must exist.
        fill: writes into the folder that it is given. If it raises, nothing is left.

    Raises:
        CheckpointError: another process has been writing in the same parent for ``LOCK_SECONDS``.
        OSError: the folder cannot be written.
    """
    with _only_writer(target.parent) as alone:
        for leftover in target.parent.glob(HIDDEN.format("*")) if alone else ():
            shutil.rmtree(leftover, ignore_errors=True)
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
    """Remove a folder that ``publish`` made. If killed half way, it leaves nothing under the folder's name."""
    hidden = folder.with_name(HIDDEN.format(folder.name))
    shutil.rmtree(hidden, ignore_errors=True)
    folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _flush_all(folder: Path) -> None:
    """Flush a folder and all that is in it to disk, so that a crash after a rename cannot leave it empty."""
    for path in (*folder.rglob("*"), folder):
        _flush(path)


def _flush(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _only_writer(folder: Path) -> Iterator[bool]:
    """Hold the folder's lock until the block or the process ends; yield False if the file system has no locks."""
    with (folder / LOCK).open("a") as handle:
        locked = _lock(handle, folder)
        try:
            yield locked
        finally:
            if locked:
                # Unlocked explicitly: a process forked meanwhile would keep the lock after the file is closed here.
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
    """Yield an empty directory that is renamed to ``target`` if the block succeeds; otherwise nothing is left.

    An old directory at ``target`` is removed only when the new one has replaced it.
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
    """Write a text file atomically; see ``replacing``."""
    with replacing(file) as handle:
        handle.write(text)


@contextlib.contextmanager
def replacing(file: Path) -> Iterator[IO[str]]:
    """Yield a text file that is flushed and renamed to ``file`` if the block succeeds.

    A failure leaves the old file as it was. A link stays one: what it leads to is replaced. What is no regular file
    (``/dev/stdout``, a pipe) is written to.

    Raises:
        OSError: the file cannot be written.
    """
    file = Path(os.path.realpath(file))
    if file.exists() and not file.is_file() and not file.is_dir():
        with file.open("w", encoding="utf-8") as handle:
            yield handle
        return
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


def read_json(file: Path, subject: str, error: type[MegarlError]) -> dict[str, Any]:
    """Return the object in a JSON file.

    Args:
        file: the file to read.
        subject: start of the message: the setting or folder that names the file.
        error: class to raise.

    Raises:
        MegarlError: of the class ``error``: the file is missing, or does not hold a JSON object.
    """
    try:
        parsed = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as cause:
        raise error(f"{subject}: {file} does not exist") from cause
    except (OSError, ValueError, RecursionError) as cause:
        raise error(f"{subject}: {file} cannot be read as JSON ({cause})") from cause
    if not isinstance(parsed, dict):
        raise error(f"{subject}: {file} holds no JSON object")
    return parsed


def append_line(file: Path, line: str) -> None:
    """Append a line to a file, completely or not at all, and flush it to disk. Makes the file if its folder exists.

    Raises:
        OSError: the line cannot be written; the file is as before.
    """
    with file.open("ab", buffering=0) as handle:
        before = os.fstat(handle.fileno()).st_size
        try:
            data = memoryview(f"{line}\n".encode())
            while data:  # a full disk may accept a part of it
                data = data[handle.write(data) :]
            os.fsync(handle.fileno())
        except BaseException:
            os.ftruncate(handle.fileno(), before)
            raise


@contextlib.contextmanager
def writing(file: Path, error: type[MegarlError] = CheckpointError) -> Iterator[None]:
    """Turn an OSError in the block into an error that names the file.

    Raises:
        MegarlError: of the class ``error``, instead of an OSError.
    """
    try:
        yield
    except OSError as cause:
        raise error(f"'{file}' cannot be written: {cause.strerror or cause}") from cause


def user_path(field: str, value: str | Path) -> Path:
    """Return a path that a user wrote as an absolute one, with ``~`` replaced. It need not exist.

    Args:
        field: dotted name of the setting, or name of the option, for the message.
        value: the path.

    Raises:
        ConfigError: no file can have this path: an unknown ``~user``, a name that is too long, a zero byte, no
            permission.
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


def find_file(field: str, value: str, folder: Path | None = None, *, or_folder: bool = False) -> Path:
    """Return the absolute path of an existing file that a user named.

    Args:
        field: dotted name of the setting, for the message.
        value: the path. A relative one is looked up in ``folder`` first, then in the current folder.
        folder: folder of the recipe.
        or_folder: an existing folder is found too.

    Raises:
        ConfigError: there is no such file.
    """
    given = user_path(field, value)
    relative = folder is not None and not value.startswith(("~", "/"))
    places = [folder / value, given] if folder is not None and relative else [given]
    for place in places:
        if place.is_file() or (or_folder and place.is_dir()):
            return place.resolve()
    looked = " or ".join(str(place) for place in dict.fromkeys(places))
    raise ConfigError(f"{field} is '{value}', but there is no file {looked}")
