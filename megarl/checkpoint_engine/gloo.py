# SPDX-License-Identifier: Apache-2.0
"""Transport over TCP between hosts: torch's gloo broadcasts every bucket to all receivers.

The group is built directly from a store, so that neither the trainer's nor vLLM's default process group is touched. It
lives for one transfer (some milliseconds to set up), so that a restarted receiver needs no special case. It uses the
interface ``GLOO_SOCKET_IFNAME`` if set, else the one by which the hosts reach each other.
"""

import contextlib
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from megarl.checkpoint_engine.base import Frame, Link
from megarl.errors import WeightSyncError
from megarl.network import gloo_devices, listen, own_address

PREFIX = "megarl"
FAILED = f"{PREFIX}-failed"
# Integers before each frame: bytes of the header, bytes of the payload (-1 in the last frame, which has none).
SIZES = 2


class _Group:
    """A gloo group: rank 0 sends, ranks 1 .. receivers receive. Turns gloo's errors into ``WeightSyncError``."""

    def __init__(self, store: TCPStore, host: str, rank: int, size: int, timeout: float) -> None:
        self._store, self._timeout = store, timeout
        with self._errors("joining the group"):
            options = ProcessGroupGloo._Options()
            options._timeout = timedelta(seconds=timeout)
            options._devices = [ProcessGroupGloo.create_device(**device) for device in gloo_devices(host)]
            self._group = ProcessGroupGloo(PrefixStore(PREFIX, store), rank, size, options)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Broadcast from rank 0, in place."""
        if not tensor.numel():
            return
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        with self._errors(f"broadcasting {tensor.nbytes} bytes"):
            self._group.broadcast([tensor], options).wait()

    @contextlib.contextmanager
    def _errors(self, doing: str) -> Any:
        try:
            yield
        except RuntimeError as error:
            raise WeightSyncError(f"gloo transfer: {doing} failed: {_reason(self._store) or error}") from error


class GlooSender:
    """Trainer half. The group forms at the first bucket, when the receivers know the endpoint."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._host = own_address()
        self._group: _Group | None = None
        try:
            listener = listen(self._host)
            self._store: TCPStore | None = TCPStore(
                self._host,
                listener.getsockname()[1],
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=link.timeout),
                master_listen_fd=listener.detach(),  # the store closes it
            )
        except (RuntimeError, OSError) as error:
            raise WeightSyncError(f"gloo transfer: cannot open a store on {self._host}: {error}") from error
        self._port = self._store.port

    def endpoint(self) -> dict[str, Any]:
        """Return the store's address, the group's size and the time limit."""
        return {
            "transport": "gloo",
            "host": self._host,
            "port": self._port,
            "receivers": self._link.receivers,
            "timeout": self._link.timeout,
        }

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Return plain memory."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def put(self, header: bytes, payload: torch.Tensor) -> None:
        """Broadcast one bucket; return when this rank's part is done."""
        self._frame(header, payload.numel())
        self._join().broadcast(payload)

    def end(self, manifest: bytes) -> None:
        """Broadcast the manifest."""
        self._frame(manifest, -1)

    def close(self) -> None:
        """Leave the group and stop the store."""
        self._group = self._store = None

    def _frame(self, header: bytes, payload_bytes: int) -> None:
        group = self._join()
        group.broadcast(torch.tensor([len(header), payload_bytes], dtype=torch.int64))
        group.broadcast(torch.frombuffer(bytearray(header), dtype=torch.uint8))

    def _join(self) -> _Group:
        if self._group is None:
            if self._store is None:
                raise WeightSyncError("gloo transfer: the sender is closed")
            self._group = _Group(self._store, self._host, 0, self._link.receivers + 1, self._link.timeout)
        return self._group


class GlooReceiver:
    """Worker half. Joins the group when it is built."""

    def __init__(self, endpoint: dict[str, Any], index: int) -> None:
        host, port, timeout = endpoint["host"], endpoint["port"], endpoint["timeout"]
        self._store: TCPStore | None
        try:
            self._store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))
        except RuntimeError as error:
            raise WeightSyncError(f"gloo transfer: receiver {index} cannot reach {host}:{port}: {error}") from error
        self._index = index
        self._group: _Group | None = _Group(self._store, host, index + 1, endpoint["receivers"] + 1, timeout)

    def take(self) -> Frame:
        """Receive the next frame into fresh memory."""
        if self._group is None:
            raise WeightSyncError("gloo transfer: the receiver is closed")
        sizes = torch.empty(SIZES, dtype=torch.int64)
        self._group.broadcast(sizes)
        header = torch.empty(int(sizes[0]), dtype=torch.uint8)
        self._group.broadcast(header)
        if sizes[1] < 0:
            return Frame(header.numpy().tobytes(), None)
        payload = torch.empty(int(sizes[1]), dtype=torch.uint8)
        self._group.broadcast(payload)
        return Frame(header.numpy().tobytes(), payload)

    def fail(self, reason: str) -> None:
        """Store the reason and leave the group. The sender's next broadcast fails and quotes it."""
        with contextlib.suppress(RuntimeError):
            if self._store is not None:
                self._store.set(FAILED, f"receiver {self._index}: {reason}")
        self.close()

    def close(self) -> None:
        """Leave the group."""
        self._group = self._store = None


def open_sender(link: Link) -> GlooSender:
    """See ``base.open_sender``."""
    return GlooSender(link)


def open_receiver(endpoint: dict[str, Any], index: int) -> GlooReceiver:
    """See ``base.open_receiver``."""
    return GlooReceiver(endpoint, index)


def _reason(store: TCPStore) -> str | None:
    """Return the reason that a receiver stored, if any."""
    with contextlib.suppress(RuntimeError):
        if store.check([FAILED]):
            return store.get(FAILED).decode()
    return None
