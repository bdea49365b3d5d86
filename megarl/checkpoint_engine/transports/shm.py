# SPDX-License-Identifier: Apache-2.0
"""Transfer by shared memory: buckets are files in /dev/shm that receivers map. Same host only.

Layout of a transfer's folder ``/dev/shm/megarl-<uid>-<pid>-<random>``::

    lock               held (flock) for as long as the sender lives; the kernel frees it when the process dies
    00000.data         payload of a bucket
    00000.head         its header; renamed into place last, which publishes the bucket
    00000.ack.<index>  receiver <index> has mapped it
    end.head           the manifest
    failed             a receiver's error; ends the transfer at both ends

A mapped file stays usable after it is unlinked. The sender unlinks each bucket once every receiver has mapped it, so at
most ``DEPTH`` buckets exist at a time. ``shm_folders`` removes what dead senders leave behind.
"""

import contextlib
import mmap
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megarl.checkpoint_engine.base import Frame, Link
from megarl.checkpoint_engine.transports.shm_folders import is_locked, make_folder, map_new_file, remove_stale
from megarl.errors import WeightSyncError
from megarl.network import boot_id

DEPTH = 2


def host_id() -> str:
    """Return the identity of /dev/shm, equal for processes that can share memory.

    It is the host's since its last boot (``boot_id``) and the mount's: containers of one host may have one each.
    """
    return f"{boot_id()}-{Path('/dev/shm').stat().st_dev}"


class ShmSender:
    """Trainer half. Raises ``WeightSyncError`` if space runs out, after the timeout, or when a receiver failed."""

    stays = reuses_buffers = False

    def __init__(self, link: Link) -> None:
        remove_stale()
        self._receivers = link.receivers
        self._timeout = link.timeout
        self._deadline = time.monotonic() + link.timeout
        self._count = 0
        self._oldest = 0
        self._folder, self._lock = make_folder()

    def endpoint(self) -> dict[str, Any]:
        """Return the folder, the host's identity and the time limit."""
        return {"transport": "shm", "folder": str(self._folder), "host": host_id(), "timeout": self._timeout}

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Map a new file of ``nbytes``. Waits while ``DEPTH`` buckets are unread."""
        while self._count - self._oldest >= DEPTH:
            self._release_oldest()
        return torch.frombuffer(map_new_file(self._folder / f"{self._count:05}.data", nbytes), dtype=torch.uint8)

    def put(self, header: bytes, payload: torch.Tensor) -> None:
        """Publish the bucket that ``buffer`` returned last."""
        _publish(self._folder / f"{self._count:05}.head", header)
        self._count += 1

    def settle(self, work: torch.Event | None = None) -> None:
        """Do nothing: the buckets are in host memory."""

    def end(self, manifest: bytes) -> None:
        """Publish the manifest."""
        _publish(self._folder / "end.head", manifest)

    def close(self) -> None:
        """Remove the folder. Receivers keep what they have mapped."""
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _release_oldest(self) -> None:
        """Wait until every receiver has mapped the oldest bucket, then remove it."""
        stem = f"{self._oldest:05}"
        acks = [self._folder / f"{stem}.ack.{index}" for index in range(self._receivers)]

        def all_mapped() -> bool:
            _raise_if_failed(self._folder)
            return all(ack.exists() for ack in acks)

        _wait(all_mapped, self._deadline, f"receivers have not read bucket {self._oldest} within {self._timeout:g} s")
        for path in (self._folder / f"{stem}.data", self._folder / f"{stem}.head", *acks):
            path.unlink()
        self._oldest += 1


class ShmReceiver:
    """Worker half. Raises ``WeightSyncError`` on another host, after the timeout, or when the sender died."""

    stays = reuses_buffers = False

    def __init__(self, endpoint: dict[str, Any], index: int) -> None:
        if endpoint["host"] != host_id():
            raise WeightSyncError(
                f"checkpoint_engine.transport is 'shm', but receiver {index} is on another host than the trainer "
                f"or in another container (it has {host_id()}, not {endpoint['host']}); use transport 'gloo'"
            )
        self._folder = Path(endpoint["folder"])
        self._index = index
        self._timeout = endpoint["timeout"]
        self._deadline = time.monotonic() + self._timeout
        self._next = 0

    def take(self) -> Frame:
        """Map the next bucket, or return the manifest."""
        stem = f"{self._next:05}"
        head, end = self._folder / f"{stem}.head", self._folder / "end.head"

        def published() -> bool:
            if head.exists() or end.exists():
                return True
            _raise_if_failed(self._folder)
            if not is_locked(self._folder):
                raise WeightSyncError(f"the sender of {self._folder.name} is gone before its transfer ended")
            return False

        _wait(published, self._deadline, f"bucket {self._next} did not come within {self._timeout:g} s")
        if not head.exists():
            return Frame(end.read_bytes(), None)
        header = head.read_bytes()
        with open(self._folder / f"{stem}.data", "r+b") as file:
            # Copy on write: torch needs a writable buffer, and a write here must never reach the other receivers.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        (self._folder / f"{stem}.ack.{self._index}").touch()
        self._next += 1
        return Frame(header, torch.frombuffer(mapped, dtype=torch.uint8))

    def close(self) -> None:
        """Do nothing: mappings are released with the tensors that use them."""

    def fail(self, reason: str) -> None:
        """Tell the sender and the other receivers, so that they do not wait for their timeouts."""
        with contextlib.suppress(OSError):
            _publish(self._folder / "failed", f"receiver {self._index}: {reason}".encode())


def open_sender(link: Link) -> ShmSender:
    """See ``base.open_sender``."""
    return ShmSender(link)


def open_receiver(endpoint: dict[str, Any], index: int) -> ShmReceiver:
    """See ``base.open_receiver``."""
    return ShmReceiver(endpoint, index)


def _publish(path: Path, data: bytes) -> None:
    """Write a file so that it appears complete, at once."""
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    hidden.write_bytes(data)
    hidden.rename(path)


def _raise_if_failed(folder: Path) -> None:
    """Raise ``WeightSyncError`` if a receiver has reported a failure."""
    with contextlib.suppress(FileNotFoundError):
        raise WeightSyncError((folder / "failed").read_text())


def _wait(ready: Callable[[], bool], deadline: float, problem: str) -> None:
    """Poll with growing pauses, from 0.1 ms to 5 ms; transferring an adapter takes a few ms."""
    pause = 1e-4
    while not ready():
        if time.monotonic() > deadline:
            raise WeightSyncError(problem)
        time.sleep(pause)
        pause = min(2 * pause, 5e-3)
