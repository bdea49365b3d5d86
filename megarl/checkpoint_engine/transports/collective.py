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
from megarl.checkpoint_engine.transports.event_wait import wait_for
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

    @property
    def late(self) -> str:
        """The message if broadcasts take too long."""
        return f"{self.name} transfer: broadcasts did not end in time"

    def open_sender(self, link: Link) -> "CollectiveSender":
        """See ``base.open_sender``. Raises also what ``check`` raises."""
        self.check()
        return CollectiveSender(link, self)

    def open_receiver(self, endpoint: dict[str, Any], index: int) -> "CollectiveReceiver":
        """See ``base.open_receiver``. Raises also what ``check`` raises."""
        self.check()
        return CollectiveReceiver(endpoint, index, self)


class Group:
    """A group in which rank 0 sends and ranks 1 .. receivers receive.

    On a GPU broadcasts have a stream of their own, so that the next bucket is filled, or the last loaded, meanwhile.
    """

    def __init__(self, backend: Backend, store: TCPStore, host: str, rank: int, size: int, timeout: float) -> None:
        self._backend, self._store = backend, store
        self._stream = torch.cuda.Stream(priority=-1) if backend.device == "cuda" else None
        with self._errors("joining the group"):
            self._group = backend.build(PrefixStore(PREFIX, store), host, rank, size, timeout)

    def broadcast(self, tensor: torch.Tensor, after: Any = None) -> Any:
        """Broadcast from rank 0, in place. On a GPU the host does not wait.

        Args:
            tensor: the bytes.
            after: an event before which the broadcast does not begin; default: all work of the current stream.

        Returns:
            On a GPU the event of its end, else None.
        """
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        with self._errors(f"broadcasting {tensor.nbytes} bytes"):
            if self._stream is None:
                self._group.broadcast([tensor], options).wait()
                return None
            self._stream.wait_event(after or torch.cuda.current_stream().record_event())
            with torch.cuda.stream(self._stream):
                self._group.broadcast([tensor], options).wait()
                return self._stream.record_event()

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
        self._group: Group | None = None
        # The end of the last broadcast from each buffer.
        self._sent: list[Any] = [None] * DEPTH
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

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Return the older one of two buffers. What the current stream writes into it waits for its last broadcast."""
        held = super().buffer(nbytes)
        if (sent := self._sent[self._count % DEPTH]) is not None:
            torch.cuda.current_stream().wait_event(sent)
        return held

    def settle(self, work: torch.Event | None = None) -> None:
        """Wait for an event, or for all broadcasts, but not for a receiver that is gone: they end then."""
        deadline = self._begin()
        try:
            for event in filter(None, [work] if work else self._sent):
                wait_for(event, self._hub.check, deadline, self._backend.late)
        except WeightSyncError:
            self._leave()
            raise

    def close(self) -> None:
        """Leave the group, stop the store, disconnect."""
        self._leave()
        self._store = None
        super().close()

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _allocate(self, number: int, nbytes: int) -> tuple[torch.Tensor, bytes]:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._backend.device), b""

    def _settle(self, number: int, payload: torch.Tensor) -> None:
        """Nothing: the broadcast waits for the stream."""

    def _move(self, payload: torch.Tensor) -> None:
        if self._group is None:
            if self._store is None:
                raise WeightSyncError(f"{self._backend.name} transfer: the sender is closed")
            size = self._link.receivers + 1
            self._group = Group(self._backend, self._store, self._hub.host, 0, size, self._link.timeout)
        try:
            self._sent[self._count % DEPTH] = self._group.broadcast(payload)
        except WeightSyncError:
            self._hub.check()  # a receiver's own reason says more
            raise


class CollectiveReceiver(LiveReceiver):
    """See ``LiveReceiver``."""

    def __init__(self, endpoint: dict[str, Any], index: int, backend: Backend) -> None:
        super().__init__(endpoint, index)
        self._endpoint, self._backend = endpoint, backend
        self._group: Group | None = None
        self._store: TCPStore | None = None
        self._buffers: list[torch.Tensor | None] = [None] * DEPTH
        # Buffers that broadcasts may write to once the work of the current stream until then is done.
        self._free: list[Any] = [None] * DEPTH
        self._last: int | None = None

    def settle(self) -> None:
        """Wait for the current stream, but not for a sender that is gone."""
        deadline = time.monotonic() + self._timeout
        wait_for(torch.cuda.current_stream().record_event(), self._line.check, deadline, self._backend.late)

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
            self._buffers[number] = held = None
            held = self._buffers[number] = torch.empty(nbytes, dtype=torch.uint8, device=self._backend.device)
        group = self._join(deadline)
        if held.is_cuda and self._last is not None:
            # All that reads the bucket before was launched by now.
            self._free[self._last] = torch.cuda.current_stream().record_event()
        self._last = number
        arrived = group.broadcast(held[:nbytes], self._free[number])
        if arrived is not None:
            torch.cuda.current_stream().wait_event(arrived)
        return held[:nbytes]

    def _join(self, deadline: float) -> Group:
        if self._group is None:
            host, port, size = self._endpoint["host"], self._endpoint["store"], self._endpoint["receivers"] + 1
            wait = timedelta(seconds=max(deadline - time.monotonic(), 1.0))
            try:
                self._store = TCPStore(host, port, is_master=False, timeout=wait)
            except RuntimeError as error:
                raise WeightSyncError(f"receiver {self._index} cannot reach {host}:{port}: {error}") from error
            self._group = Group(self._backend, self._store, host, self._index + 1, size, self._timeout)
        return self._group


def build_gloo(store: Any, host: str, rank: int, size: int, timeout: float) -> Any:
    """Return a gloo group whose members listen on the address by which they reach ``host``."""
    options = ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout)
    options._devices = [ProcessGroupGloo.create_device(**device) for device in gloo_devices(host)]
    return ProcessGroupGloo(store, rank, size, options)
