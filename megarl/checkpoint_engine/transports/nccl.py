# SPDX-License-Identifier: Apache-2.0
"""Transport between GPUs of one host or of several, from device memory to device memory."""

from datetime import timedelta
from typing import Any

import torch

from megarl.checkpoint_engine.base import Link
from megarl.checkpoint_engine.transports.collective import Backend, CollectiveReceiver, CollectiveSender
from megarl.errors import WeightSyncError


def build(store: Any, host: str, rank: int, size: int, timeout: float) -> Any:
    """Return a NCCL group on this process's current GPU."""
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout)
    return ProcessGroupNCCL(store, rank, size, options)


NCCL = Backend("nccl", "cuda", build)


def open_sender(link: Link) -> CollectiveSender:
    """See ``base.open_sender``. Raises ``WeightSyncError`` without a GPU."""
    _check()
    return CollectiveSender(link, NCCL)


def open_receiver(endpoint: dict[str, Any], index: int) -> CollectiveReceiver:
    """See ``base.open_receiver``. Raises ``WeightSyncError`` without a GPU."""
    _check()
    return CollectiveReceiver(endpoint, index, NCCL)


def _check() -> None:
    if not torch.cuda.is_available():
        raise WeightSyncError("checkpoint_engine.transport is 'nccl', which needs GPUs; use 'gloo' or 'shm' on CPUs")
