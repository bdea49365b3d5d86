# SPDX-License-Identifier: Apache-2.0
"""Transfer between Ascend NPUs: the broadcasts of ``collective`` on a process group of ``torch_npu``'s HCCL.

No NPU was at hand, so this has never run; what it shares with ``gloo`` and ``nccl`` is tested through gloo. Digests are
computed in host memory, because the kernels of ``kernels/`` are for CUDA.
"""

import importlib.util
from datetime import timedelta
from typing import Any

from megarl.checkpoint_engine.transports.collective import Backend
from megarl.errors import WeightSyncError


def build(store: Any, host: str, rank: int, size: int, timeout: float) -> Any:
    """Return a HCCL group on this process's current NPU."""
    from torch_npu._C._distributed_c10d import ProcessGroupHCCL

    options = ProcessGroupHCCL.Options()
    options.op_timeout = timedelta(seconds=timeout)
    return ProcessGroupHCCL(store, rank, size, options)


def _check() -> None:
    if importlib.util.find_spec("torch_npu") is None:
        raise WeightSyncError("checkpoint_engine.transport is 'hccl', which needs torch_npu and Ascend NPUs")


HCCL = Backend("hccl", "npu", build, _check)
open_sender, open_receiver = HCCL.open_sender, HCCL.open_receiver
