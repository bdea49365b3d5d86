# SPDX-License-Identifier: Apache-2.0
"""Define the protocol of a transport, and register the transports.

A transport moves buckets of bytes from one sender (trainer rank 0; ``senders`` says when others send too) to its
receivers (one in each vLLM worker), whatever the bytes mean. The sender opens first. Its ``endpoint`` (a small
JSON-able dictionary) reaches the receivers by another way (Ray). Sender and receivers then run concurrently, bucket by
bucket, so that neither host memory nor a ring of device buffers must hold the whole model. A new transport is one
module and one line in ``TRANSPORTS``.

Some transports are for one transfer (``shm``). Others stay connected (``stays``): the next transfer needs no endpoint,
and receivers answer the sender itself, so that no other process has a part in a transfer. Threads of their workers
wait for it, beside the engine's own loop.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import torch

from megarl.errors import ConfigError
from megarl.plugins import pick_or_load


class Frame(NamedTuple):
    """One step of a transfer.

    Attributes:
        header: ``records.Bucket.to_bytes``, or ``Manifest.to_bytes`` in the last frame.
        payload: ``[nbytes]`` uint8, on the CPU or a GPU; None in the last frame. Valid until the next ``take`` if the
            receiver reuses buffers, else as long as a tensor refers to it.
    """

    header: bytes
    payload: torch.Tensor | None


class Sender(Protocol):
    """The trainer's half. Used by one thread at a time.

    Attributes:
        stays: True if it serves one transfer after the other; then it has ``receipts``.
        reuses_buffers: True if ``buffer`` returns the same memory again and again.
        forget: set by the ``Outbox`` if buffers are reused. Call it with a buffer's address before the buffer makes way
            for a larger one: it drops views, which would keep the memory.
    """

    stays: bool
    reuses_buffers: bool
    forget: Callable[[int], Any]

    def endpoint(self) -> dict[str, Any]:
        """Return the JSON-able address by which receivers find this sender."""
        ...

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Return ``[nbytes]`` uint8 to be filled and passed to ``put``. May wait for a free slot."""
        ...

    def put(self, header: bytes, payload: torch.Tensor) -> None:
        """Send one bucket. ``payload`` came from ``buffer``."""
        ...

    def settle(self, work: torch.Event | None = None) -> None:
        """Wait until all buckets have left, or for an event. Only called if ``buffer`` returns memory of a GPU.

        Args:
            work: an event of the sender's own stream, which may wait for a bucket to leave.

        Raises:
            WeightSyncError: a receiver failed or is gone, or it took too long.
        """
        ...

    def end(self, manifest: bytes) -> None:
        """Send the last frame."""
        ...

    def receipts(self) -> list[bytes]:
        """Wait for every receiver's answer to the transfer that ended: its receipt. Only if it ``stays``.

        Raises:
            WeightSyncError: a receiver failed, is gone, or did not answer in time.
        """
        ...

    def close(self) -> None:
        """Release everything. Called when every receiver is done, or after a failure; may be called twice."""
        ...


class Receiver(Protocol):
    """A sampler worker's half. Used by one thread at a time.

    Attributes:
        stays: as the sender's; then it has ``begins`` and ``answer``.
        reuses_buffers: True if a payload is overwritten by a later one.
    """

    stays: bool
    reuses_buffers: bool

    def begins(self) -> bool:
        """Wait, however long, until a transfer begins; False if the sender disconnects. Only if it ``stays``."""
        ...

    def take(self) -> Frame:
        """Wait for the next frame."""
        ...

    def settle(self) -> None:
        """Wait for the current stream, on which buckets arrive. Only called if payloads are in a GPU's memory.

        Raises:
            WeightSyncError: the sender is gone, or it took too long.
        """
        ...

    def answer(self, receipt: bytes) -> None:
        """Send the receipt of a transfer that was read to its end. Only if it ``stays``."""
        ...

    def fail(self, reason: str) -> None:
        """Report this receiver's failure to the sender if possible. Never raises."""
        ...

    def close(self) -> None:
        """Release everything. May be called twice."""
        ...


@dataclass(frozen=True)
class Link:
    """Parameters of a sender.

    Attributes:
        receivers: number of receivers.
        timeout: seconds that the whole transfer may take.
        indices: the receivers' indices; empty: 0 .. receivers - 1.
    """

    receivers: int
    timeout: float
    indices: Sequence[int] = ()


# Name in ``checkpoint_engine.transport`` -> module with ``open_sender(link)`` and ``open_receiver(endpoint,
# receiver_index)``, which raise WeightSyncError (unreachable peer, no space, timeout). Imported on use, because some
# transports need libraries that not every host has.
TRANSPORTS: dict[str, str] = {
    "shm": "megarl.checkpoint_engine.transports.shm",
    "gloo": "megarl.checkpoint_engine.transports.gloo",
    "ipc": "megarl.checkpoint_engine.transports.ipc",
    "nccl": "megarl.checkpoint_engine.transports.nccl",
    "hccl": "megarl.checkpoint_engine.transports.hccl",
}


def load_transport(name: str, *halves: str) -> Any:
    """Return the module, or the user's object, that opens both halves of a transport.

    Args:
        name: ``checkpoint_engine.transport``.
        halves: functions that it must have; default: both.

    Raises:
        ConfigError: the transport is unknown or lacks a function.
    """
    opener = pick_or_load(TRANSPORTS, name, "transport", "checkpoint_engine.transport")
    opener = import_module(opener) if isinstance(opener, str) else opener
    for half in halves or ("open_sender", "open_receiver"):
        if not hasattr(opener, half):
            raise ConfigError(f"checkpoint_engine.transport is '{name}', which has no {half}")
    return opener


def open_sender(name: str, link: Link) -> Sender:
    """Open the sending half.

    Raises:
        ConfigError: the transport is unknown.
        WeightSyncError: the transport cannot be opened on this host.
    """
    return load_transport(name, "open_sender").open_sender(link)


def open_receiver(endpoint: dict[str, Any], index: int) -> Receiver:
    """Open the receiving half.

    Args:
        endpoint: the sender's endpoint. Its ``"transport"`` names the module. If several ranks send, each one's is in
            ``"senders"``, by the receivers' indices.
        index: index of this receiver over all engines.

    Raises:
        ConfigError: the transport is unknown.
        WeightSyncError: the sender cannot be reached.
    """
    endpoint = endpoint.get("senders", {}).get(str(index), endpoint)
    return load_transport(str(endpoint.get("transport")), "open_receiver").open_receiver(endpoint, index)
