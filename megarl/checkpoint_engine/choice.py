# SPDX-License-Identifier: Apache-2.0
"""Choose a transport by where trainer and engines compute (``checkpoint_engine.transport: auto``)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from megarl.checkpoint_engine.transports.shm import host_id
from megarl.cuda_memory import offer, reads


class Memory(NamedTuple):
    """The memory that a process computes in.

    Attributes:
        host: identity of the host memory that it can share.
        gpu: identity of its current GPU; empty on a CPU.
    """

    host: str
    gpu: str


class Sender(NamedTuple):
    """A trainer rank, which may send weights.

    Attributes:
        memory: its memory.
        offer: what shows a receiver on another GPU whether it can read this one's (``cuda_memory``).
    """

    memory: Memory
    offer: bytes = b""


class Receiver(NamedTuple):
    """A process that receives weights.

    Attributes:
        memory: its memory.
        reads: True if its GPU reads the memory of the sender's, another one of the same host.
    """

    memory: Memory
    reads: bool = False


def own_memory() -> Memory:
    """Return this process's memory."""
    return Memory(host_id(), gpu_id() or "")


def own_sender() -> Sender:
    """Return where this process computes, to be shown to the receivers."""
    return Sender(own_memory(), offer())


def own_receiver(sender: Sender) -> Receiver:
    """Return where this process computes, and whether it reads the sender's GPU."""
    own = own_memory()
    apart = own.host == sender.memory.host and own.gpu != sender.memory.gpu
    return Receiver(own, apart and reads(sender.offer))


def as_receiver(answer: Sequence[Any]) -> Receiver:
    """Return the receiver that a vLLM worker described: host, GPU, whether it reads the sender's."""
    *memory, reads_it = answer
    return Receiver(Memory(*memory), reads_it)


def gpu_id() -> str | None:
    """Return the identity of this process's current GPU; None without one."""
    if not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def choose_transport(ranks: Sequence[Memory], receivers: Sequence[Receiver]) -> tuple[str, str]:
    """Return the name of a transport, and why it was chosen.

    Args:
        ranks: memory of each trainer rank. Rank 0 sends; with ``ipc`` others may too, see ``senders``.
        receivers: all vLLM workers.
    """
    sender, memories = ranks[0], [receiver.memory for receiver in receivers]
    gpus = [memory.gpu for memory in (sender, *memories)]
    if all(memory == sender for memory in memories):
        shared = "share one GPU" if sender.gpu else "compute on the CPUs of one host"
        return "ipc", f"trainer rank 0 and all engines {shared}"
    if all(memory in ranks for memory in memories):
        return "ipc", f"every engine gets them from the trainer rank on its {'GPU' if sender.gpu else 'host'}"
    if all(gpus) and len(set(gpus)) == len(gpus):
        # One copy over the GPUs' link takes less than a broadcast. Several would share that link.
        if len(receivers) == 1 and receivers[0].reads:
            return "ipc", "the engine's GPU reads the memory of trainer rank 0's"
        return "nccl", "trainer rank 0 and every engine's ranks have a GPU each"
    if all(memory.host == sender.host for memory in memories):
        if all(gpus):
            return "ipc", "trainer rank 0 and all engines have GPUs of one host, and share some"
        return "shm", "trainer rank 0 and all engines are on one host"
    return "gloo", "trainer rank 0 and the engines are on several hosts"
