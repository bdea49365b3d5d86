# SPDX-License-Identifier: Apache-2.0
"""Transfer inside one host: the receivers map the sender's buffers, so that no byte is copied on the way.

Processes on GPUs open the same memory by CUDA IPC handles, on CPUs they map the same file in /dev/shm. The receivers'
own copy, into vLLM's tensors, is the only one. On the same GPU their kernels wait for the sender's by an event of its
process. The memory of another GPU is opened too, if theirs can access it: its buckets are copied once before they are
read (``staging``).
"""

import mmap
import os
import pickle
import shutil
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megarl.checkpoint_engine.base import Link
from megarl.checkpoint_engine.choice import Memory, own_memory
from megarl.checkpoint_engine.transports.event_wait import wait_for
from megarl.checkpoint_engine.transports.live import LiveReceiver, LiveSender
from megarl.checkpoint_engine.transports.shm_folders import make_folder, map_new_file, remove_stale
from megarl.checkpoint_engine.transports.staging import Staging
from megarl.cuda_memory import exported, opened
from megarl.errors import WeightSyncError

# The answer of a receiver whose streams wait for the sender's, so that the sender's host need not.
WAITS = b"W"


class IpcSender(LiveSender):
    """See ``LiveSender``."""

    transport, acknowledged = "ipc", True

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        # Of each buffer on a GPU: when it is full. And whether all receivers wait for that by themselves.
        self._full: dict[int, torch.cuda.Event] = {}
        self._awaited = False
        self._folder: Path | None = None
        self._remove: Callable[[], Any] = lambda: None

    def endpoint(self) -> dict[str, Any]:
        """Return also the memory that it is in."""
        return super().endpoint() | {"memory": list(own_memory())}

    def close(self) -> None:
        """Disconnect; the memory goes when the receivers have closed it too."""
        super().close()
        self._folder = None
        self._remove()

    def _note(self, acknowledgements: list[bytes]) -> None:
        self._awaited = all(answer == WAITS for answer in acknowledgements)

    def _settle(self, number: int, payload: torch.Tensor) -> None:
        if payload.is_cuda and self._awaited:
            self._full[number].record()
        else:
            super()._settle(number, payload)

    def _allocate(self, number: int, nbytes: int) -> tuple[torch.Tensor, bytes]:
        if torch.cuda.is_available():
            buffer = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
            full = self._full[number] = torch.cuda.Event(interprocess=True)
            return buffer, pickle.dumps((exported(buffer), full.ipc_handle()))
        if self._folder is None:
            remove_stale()
            self._folder, lock = make_folder()
            # Also if nobody closes this sender: when it is dropped, or when the process ends.
            self._remove = weakref.finalize(self, _remove, self._folder, lock)
        for smaller in self._folder.glob(f"{number}.*"):
            smaller.unlink()  # every receiver has mapped it, and reads it no more
        path = self._folder / f"{number}.{nbytes}"
        return torch.frombuffer(map_new_file(path, nbytes), dtype=torch.uint8), str(path).encode()


class IpcReceiver(LiveReceiver):
    """See ``LiveReceiver``. Raises ``WeightSyncError`` too if it cannot map the sender's memory."""

    acknowledges = True

    def __init__(self, endpoint: dict[str, Any], index: int) -> None:
        sender, own = Memory(*endpoint["memory"]), own_memory()
        if sender.host != own.host or bool(sender.gpu) != bool(own.gpu):
            raise WeightSyncError(
                f"checkpoint_engine.transport is 'ipc', but receiver {index} computes on {_told(own)} and trainer rank "
                f"0 on {_told(sender)}; use transport 'nccl' between GPUs, 'gloo' between hosts, or auto"
            )
        super().__init__(endpoint, index)
        self._buffers: dict[int, torch.Tensor] = {}
        self._full: dict[int, torch.cuda.Event] = {}
        self._staging = Staging() if sender.gpu != own.gpu else None

    def close(self) -> None:
        """Disconnect, and close the sender's memory."""
        super().close()
        if self._staging:  # first: a copy may still read the sender's memory
            self._staging.clear()
        self._buffers = {}

    def _fetch(self, number: int, nbytes: int, news: bytes, deadline: float) -> torch.Tensor:
        if news:
            self._buffers.pop(number, None)
            self._buffers[number] = self._open(number, news)
        bucket = self._buffers[number][:nbytes]
        if self._staging:
            return self._staging.copy(bucket, number)
        if number in self._full:
            torch.cuda.current_stream().wait_event(self._full[number])
        return bucket

    def _open(self, number: int, news: bytes) -> torch.Tensor:
        """Open the memory of a buffer that ``IpcSender._allocate`` made, and on the same GPU the event of its bytes."""
        if not torch.cuda.is_available():
            with open(news.decode(), "r+b") as file:
                return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
        memory, full = pickle.loads(news)
        try:
            buffer = opened(memory)
            if not self._staging:
                self._full[number] = torch.cuda.Event.from_ipc_handle(buffer.device, full)
                self._done = WAITS
            return buffer
        except RuntimeError as error:
            raise WeightSyncError(
                f"this GPU cannot map the sender's memory ({error}); use transport 'nccl' or 'shm'"
            ) from error

    def _wait_until_read(self, ended: bool) -> None:
        deadline = time.monotonic() + self._timeout
        for full in self._full.values():  # the sender's kernels never end if it is gone
            wait_for(full, self._line.check, deadline, "the sender's GPU did not fill a bucket in time")
        if self._staging:
            self._staging.wait(ended)
        else:
            super()._wait_until_read(ended)


def open_sender(link: Link) -> IpcSender:
    """See ``base.open_sender``."""
    return IpcSender(link)


def open_receiver(endpoint: dict[str, Any], index: int) -> IpcReceiver:
    """See ``base.open_receiver``."""
    return IpcReceiver(endpoint, index)


def _told(memory: Memory) -> str:
    return f"GPU {memory.gpu} of host {memory.host}" if memory.gpu else f"the CPUs of host {memory.host}"


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
