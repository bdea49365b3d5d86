# SPDX-License-Identifier: Apache-2.0
"""Choose a transport by where trainer and engines compute (``checkpoint_engine.transport: auto``)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megarl.checkpoint_engine.transports.shm import host_id


class Memory(NamedTuple):
    """The memory that a process computes in.

    Attributes:
        host: identity of the host memory that it can share.
        gpu: identity of its current GPU; empty on a CPU.
    """

    host: str
    gpu: str


def own_memory() -> Memory:
    """Return this process's memory."""
    return Memory(host_id(), gpu_id() or "")


def gpu_id() -> str | None:
    """Return the identity of this process's current GPU; None without one."""
    if not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def choose_transport(sender: Memory, receivers: Sequence[Memory]) -> tuple[str, str]:
    """Return the name of a transport, and why it was chosen.

    Args:
        sender: memory of trainer rank 0.
        receivers: memories of all vLLM workers.
    """
    gpus = [memory.gpu for memory in (sender, *receivers)]
    if all(receiver == sender for receiver in receivers):
        shared = "share one GPU" if sender.gpu else "compute on the CPUs of one host"
        return "ipc", f"trainer rank 0 and all engines {shared}"
    if all(gpus) and len(set(gpus)) == len(gpus):
        return "nccl", "trainer rank 0 and every engine's ranks have a GPU each"
    if all(receiver.host == sender.host for receiver in receivers):
        if all(gpus):
            return "ipc", "trainer rank 0 and all engines have GPUs of one host, and share some"
        return "shm", "trainer rank 0 and all engines are on one host"
    return "gloo", "trainer rank 0 and the engines are on several hosts"
