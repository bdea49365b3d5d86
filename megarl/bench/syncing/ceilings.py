# SPDX-License-Identifier: Apache-2.0
"""Measure what the hardware allows a sync: a copy inside the device, and a NCCL broadcast to another GPU."""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch.distributed import TCPStore

from megarl.checkpoint_engine.transports.collective import Group
from megarl.checkpoint_engine.transports.nccl import NCCL
from megarl.network import LOOPBACK, listen
from megarl.sampler.environment import names_of_gpus

ROUNDS, WARM_UP = 10, 3
# A rate is measured with at most this part of the free memory per tensor: a large model leaves little of its GPU.
SHARE = 0.3
TIMEOUT = 60.0


def copy_rate(device: torch.device, nbytes: int) -> float:
    """Return GB/s of one copy inside a device: the ceiling of a sync that copies every byte once.

    Args:
        device: the device.
        nbytes: bytes of what is copied; fewer are if the device lacks memory.
    """
    nbytes = _fitting(nbytes)
    source = torch.empty(nbytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        target.copy_(source)
        if source.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return nbytes / statistics.median(seconds) / 1e9


def _fitting(nbytes: int) -> int:
    """Return ``nbytes``, or as many as this process's GPU has memory for."""
    if not torch.cuda.is_available():
        return nbytes
    torch.cuda.empty_cache()
    return min(nbytes, int(torch.cuda.mem_get_info()[0] * SHARE))


def broadcast_rate(nbytes: int, gpus: Sequence[int]) -> float:
    """Return GB/s of a NCCL broadcast of one tensor from this process's GPU to other GPUs.

    Args:
        nbytes: bytes of the tensor; fewer if this process's GPU lacks memory.
        gpus: the others, as this process counts them.
    """
    nbytes = _fitting(nbytes)
    listener = listen(LOOPBACK)
    port, size = listener.getsockname()[1], len(gpus) + 1
    # The object that serves the port must live as long as the group.
    store = TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT),
        master_listen_fd=listener.detach(),
    )  # fmt: skip
    children = []
    for rank, gpu in enumerate(gpus, 1):
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": names_of_gpus([gpu])}
        command = [sys.executable, "-m", __name__, *map(str, (port, rank, size, nbytes))]
        children.append(subprocess.Popen(command, env=environment))
    try:
        return nbytes / _seconds(store, 0, size, nbytes) / 1e9
    finally:
        # The measurement is over, and a NCCL process whose peer has left may not end by itself.
        for child in children:
            child.kill()
            child.wait(TIMEOUT)


def _seconds(store: TCPStore, rank: int, size: int, nbytes: int) -> float:
    """Broadcast again and again; return the median of the seconds."""
    group = Group(NCCL, store, LOOPBACK, rank, size, TIMEOUT)
    tensor = torch.empty(nbytes, dtype=torch.uint8, device="cuda").random_()
    seconds = []
    for number in range(WARM_UP + ROUNDS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        group.broadcast(tensor)
        torch.cuda.synchronize()
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - began)
    group.close()
    return statistics.median(seconds)


def main(port: int, rank: int, size: int, nbytes: int) -> None:
    """Take part in ``broadcast_rate`` as one of the others."""
    _seconds(TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(seconds=TIMEOUT)), rank, size, nbytes)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
