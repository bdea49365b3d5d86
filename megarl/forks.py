# SPDX-License-Identifier: Apache-2.0
"""Ask whether a process can use CUDA that is forked from this process's fork server."""

import os
from typing import Any

# What a process has open once it has initialised CUDA; asking the driver how many GPUs there are does not open it.
# Under Windows' Linux there is one device for everything.
DEVICES = ("/dev/nvidia-uvm", "/dev/dxg", "/dev/kfd")


def forks_have_gpus(context: Any) -> bool:
    """Return True if a forked process can use CUDA, which it cannot once an import in the server has initialised it.

    Starts the fork server, waits for its imports, and forks a process from it. That process tries to make a tensor,
    which takes seconds, unless it sees that the server has opened no GPU.

    Args:
        context: a ``multiprocessing`` context whose ``Process`` is forked from the server.
    """
    process = context.Process(target=_try_gpu)
    try:
        process.start()
    except (OSError, EOFError):  # the server ended: an import raised
        return False
    process.join()
    return process.exitcode == 0


def _try_gpu() -> None:
    import torch

    known = any(map(os.path.exists, DEVICES))
    if known and not opened(DEVICES) and not torch.cuda._is_in_bad_fork():
        return
    try:
        torch.zeros(1, device="cuda")
    except (RuntimeError, AssertionError):  # torch without CUDA asserts
        raise SystemExit(1) from None


def opened(prefixes: tuple[str, ...]) -> bool:
    """Return True if this process has a file open whose path begins so; its parent's open files are its own too."""
    for number in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{number}").startswith(prefixes):
                return True
        except OSError:  # the one that lists them
            continue
    return False
