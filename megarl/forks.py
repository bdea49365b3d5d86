# SPDX-License-Identifier: Apache-2.0
"""Ask whether a process can use CUDA that is forked from this process's fork server."""

from typing import Any


def forks_have_gpus(context: Any) -> bool:
    """Return True if a forked process can use CUDA, which it cannot once an import in the server has initialised it.

    Starts the fork server, waits for its imports, and forks a process from it that makes a tensor.

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

    try:
        torch.zeros(1, device="cuda")
    except (RuntimeError, AssertionError):  # torch without CUDA asserts
        raise SystemExit(1) from None
