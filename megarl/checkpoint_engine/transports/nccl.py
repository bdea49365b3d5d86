# SPDX-License-Identifier: Apache-2.0
"""Transfer between GPUs of one host or of several, from device memory to device memory."""

from datetime import timedelta
from typing import Any

import torch

from megarl.checkpoint_engine.transports.collective import Backend
from megarl.errors import WeightSyncError


def build(store: Any, host: str, rank: int, size: int, timeout: float) -> Any:
    """Return a NCCL group on this process's current GPU."""
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout)
    # Else a broadcast that is due would wait until the kernels of other buckets have begun all their programs.
    options.is_high_priority_stream = True
    return ProcessGroupNCCL(store, rank, size, options)


def _check() -> None:
    if not torch.cuda.is_available():
        raise WeightSyncError("checkpoint_engine.transport is 'nccl', which needs GPUs; use 'gloo' or 'shm' on CPUs")


NCCL = Backend("nccl", "cuda", build, _check)
open_sender, open_receiver = NCCL.open_sender, NCCL.open_receiver
