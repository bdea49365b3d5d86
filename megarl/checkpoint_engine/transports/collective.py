# SPDX-License-Identifier: Apache-2.0
"""Transfer by a torch process group's broadcasts: gloo between hosts, NCCL between GPUs, HCCL between NPUs.

The group is built directly from a store, so that neither the trainer's nor vLLM's default process group is touched; a
group of GPUs has a communicator of its own. It forms at the first transfer and lasts as long as the connection. gloo
uses the interfaces of ``GLOO_SOCKET_IFNAME`` if set, else the one by which the hosts reach each other; NCCL those of
``NCCL_SOCKET_IFNAME``.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from megarl.checkpoint_engine.base import Link
from megarl.checkpoint_engine.transports.live import DEPTH, LiveReceiver, LiveSender
from megarl.errors import WeightSyncError
from megarl.network import gloo_devices, listen

PREFIX = "megarl"


class Backend(NamedTuple):
    """One kind of process group.

    Attributes:
        name: its name in messages.
        device: the kind of memory that it broadcasts.
        build: makes a group from (store, address of the store, rank, size, timeout in seconds).
        check: raises ``WeightSyncError`` where there is no such device.
    """

    name: str
    device: str
    build: Callable[[Any, str, int, int, float], Any]
    check: Callable[[], None] = lambda: None

    def open_sender(self, link: Link) -> "CollectiveSender":
        """See ``base.open_sender``. Raises also what ``check`` raises."""
        self.check()
        return CollectiveSender(link, self)

    def open_receiver(self, endpoint: dict[str, Any], index: int) -> "CollectiveReceiver":
        """See ``base.open_receiver``. Raises also what ``check`` raises."""
        self.check()
        return CollectiveReceiver(endpoint, index, self)


class _Group:
    """A group in which rank 0 sends and ranks 1 .. receivers receive."""

    def __init__(self, backend: Backend, store: TCPStore, host: str, rank: int, size: int, timeout: float) -> None:
        self._backend, self._store = backend, store
        with self._errors("joining the group"):
            self._group = backend.build(PrefixStore(PREFIX, store), host, rank, size, timeout)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Broadcast from rank 0, in place; on a GPU the current stream waits for it, not the host."""
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        with self._errors(f"broadcasting {tensor.nbytes} bytes"):
            self._group.broadcast([tensor], options).wait()

    def close(self) -> None:
        """Leave; what still runs is given up."""
        if hasattr(self._group, "abort"):
            with contextlib.suppress(Exception):
                self._group.abort()

    @contextlib.contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise WeightSyncError(f"{self._backend.name} transfer: {doing} failed: {error}") from error


class CollectiveSender(LiveSender):
    """See ``LiveSender``."""

    def __init__(self, link: Link, backend: Backend) -> None:
        super().__init__(link)
        self._backend, self.transport = backend, backend.name
        self._group: _Group | None = None
        listener = listen(self._hub.host)
        self._store: TCPStore | None = TCPStore(
            self._hub.host,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=link.timeout),
            master_listen_fd=listener.detach(),  # the store closes it
        )
        self._port = self._store.port

    def endpoint(self) -> dict[str, Any]:
        """Return also the port of the group's store."""
        return super().endpoint() | {"store": self._port}

    def close(self) -> None:
        """Leave the group, stop the store, disconnect."""
        group, self._group, self._store = self._group, None, None
        if group is not None:
            group.close()
        super().close()

    def _allocate(self, number: int, nbytes: int) -> tuple[torch.Tensor, bytes]:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._backend.device), b""

    def _settle(self, payload: torch.Tensor) -> None:
        """Nothing: the broadcast is in the order of the stream."""

    def _move(self, payload: torch.Tensor) -> None:
        if self._group is None:
            if self._store is None:
                raise WeightSyncError(f"{self._backend.name} transfer: the sender is closed")
            size = self._link.receivers + 1
            self._group = _Group(self._backend, self._store, self._hub.host, 0, size, self._link.timeout)
        try:
            self._group.broadcast(payload)
        except WeightSyncError:
            self._hub.check()  # a receiver's own reason says more
            raise


class CollectiveReceiver(LiveReceiver):
    """See ``LiveReceiver``."""

    def __init__(self, endpoint: dict[str, Any], index: int, backend: Backend) -> None:
        super().__init__(endpoint, index)
        self._endpoint, self._backend = endpoint, backend
        self._group: _Group | None = None
        self._store: TCPStore | None = None
        self._buffers: list[torch.Tensor | None] = [None] * DEPTH

    def close(self) -> None:
        """Leave the group, and disconnect."""
        group, self._group, self._store = self._group, None, None
        if group is not None:
            group.close()
        super().close()
        self._buffers = [None] * DEPTH

    def _fetch(self, number: int, nbytes: int, news: bytes, deadline: float) -> torch.Tensor:
        held = self._buffers[number]
        if held is None or held.numel() < nbytes:
            self._buffers[number] = None
            held = self._buffers[number] = torch.empty(nbytes, dtype=torch.uint8, device=self._backend.device)
        self._join(deadline).broadcast(held[:nbytes])
        return held[:nbytes]

    def _join(self, deadline: float) -> _Group:
        if self._group is None:
            host, port, size = self._endpoint["host"], self._endpoint["store"], self._endpoint["receivers"] + 1
            wait = timedelta(seconds=max(deadline - time.monotonic(), 1.0))
            try:
                self._store = TCPStore(host, port, is_master=False, timeout=wait)
            except RuntimeError as error:
                raise WeightSyncError(f"receiver {self._index} cannot reach {host}:{port}: {error}") from error
            self._group = _Group(self._backend, self._store, host, self._index + 1, size, self._timeout)
        return self._group


def build_gloo(store: Any, host: str, rank: int, size: int, timeout: float) -> Any:
    """Return a gloo group whose members listen on the address by which they reach ``host``."""
    options = ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout)
    options._devices = [ProcessGroupGloo.create_device(**device) for device in gloo_devices(host)]
    return ProcessGroupGloo(store, rank, size, options)
