# SPDX-License-Identifier: Apache-2.0
"""Transfer inside one device: the receivers map the sender's buffers, so that no byte is copied on the way.

On a GPU both processes open the same memory by CUDA IPC handles; on a CPU they map the same file in /dev/shm. The
receivers' own copy, into vLLM's tensors, is the only one.
"""

import mmap
import os
import pickle
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megarl.checkpoint_engine.base import Link
from megarl.checkpoint_engine.choice import gpu_id
from megarl.checkpoint_engine.transports.live import LiveReceiver, LiveSender
from megarl.checkpoint_engine.transports.shm import host_id
from megarl.checkpoint_engine.transports.shm_folders import make_folder, map_new_file, remove_stale
from megarl.errors import WeightSyncError

# Position of the device's index in the arguments of torch's ``rebuild_cuda_tensor``.
DEVICE = 6


class IpcSender(LiveSender):
    """See ``LiveSender``."""

    transport, acknowledged = "ipc", True

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._folder: Path | None = None
        self._remove: Callable[[], Any] = lambda: None

    def endpoint(self) -> dict[str, Any]:
        """Return also the device whose memory it is."""
        return super().endpoint() | {"device": device_id()}

    def close(self) -> None:
        """Disconnect; the memory goes when the receivers have closed it too."""
        super().close()
        self._folder = None
        self._remove()

    def _allocate(self, number: int, nbytes: int) -> tuple[torch.Tensor, bytes]:
        if torch.cuda.is_available():
            from torch.multiprocessing.reductions import reduce_tensor

            buffer = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
            return buffer, pickle.dumps(reduce_tensor(buffer)[1])
        if self._folder is None:
            remove_stale()
            self._folder, lock = make_folder()
            # Also if nobody closes this sender: when it is dropped, or when the process ends.
            self._remove = weakref.finalize(self, _remove, self._folder, lock)
        path = self._folder / f"{number}.{nbytes}"
        return torch.frombuffer(map_new_file(path, nbytes), dtype=torch.uint8), str(path).encode()


class IpcReceiver(LiveReceiver):
    """See ``LiveReceiver``. Raises ``WeightSyncError`` too if it is on another device."""

    acknowledges = True

    def __init__(self, endpoint: dict[str, Any], index: int) -> None:
        if endpoint["device"] != device_id():
            raise WeightSyncError(
                f"checkpoint_engine.transport is 'ipc', but receiver {index} is on {device_id()} and trainer rank 0 on "
                f"{endpoint['device']}; use transport 'nccl' for several GPUs, 'gloo' for several hosts"
            )
        super().__init__(endpoint, index)
        self._buffers: dict[int, torch.Tensor] = {}

    def close(self) -> None:
        """Disconnect, and close the sender's memory."""
        super().close()
        self._buffers = {}

    def _fetch(self, number: int, nbytes: int, news: bytes, deadline: float) -> torch.Tensor:
        if news:
            self._buffers.pop(number, None)
            self._buffers[number] = _open(news)
        return self._buffers[number][:nbytes]


def open_sender(link: Link) -> IpcSender:
    """See ``base.open_sender``."""
    return IpcSender(link)


def open_receiver(endpoint: dict[str, Any], index: int) -> IpcReceiver:
    """See ``base.open_receiver``."""
    return IpcReceiver(endpoint, index)


def device_id() -> str:
    """Return the identity of the memory that this process shares with others: its GPU's, else this host's."""
    gpu = gpu_id()
    return f"GPU {gpu}" if gpu else f"host {host_id()}"


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _open(news: bytes) -> torch.Tensor:
    """Open the memory of a buffer that ``IpcSender._allocate`` made."""
    if torch.cuda.is_available():
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        arguments = list(pickle.loads(news))
        arguments[DEVICE] = torch.cuda.current_device()  # the sender may count its GPUs otherwise
        return rebuild_cuda_tensor(*arguments)
    with open(news.decode(), "r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
