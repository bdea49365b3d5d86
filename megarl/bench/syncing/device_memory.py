# SPDX-License-Identifier: Apache-2.0
"""Measure by how much the memory in use on GPUs grows, whichever process takes it."""

from collections.abc import Sequence

import torch


class DeviceMemory:
    """Memory in use on some GPUs since this object was made. Without GPUs, or the package nvidia-ml-py, it is unknown.

    Args:
        gpus: the GPUs, as this process counts them.
    """

    def __init__(self, gpus: Sequence[int]) -> None:
        self._before = {gpu: _used(gpu) for gpu in dict.fromkeys(gpus)} if torch.cuda.is_available() else {}

    def grown(self) -> dict[int, float]:
        """Return for each GPU the MiB that are in use now and were not before; memory that is cached counts."""
        now = {gpu: (before, _used(gpu)) for gpu, before in self._before.items()}
        return {gpu: (used - before) / 2**20 for gpu, (before, used) in now.items() if before and used}


def _used(gpu: int) -> int | None:
    # Not torch's mem_get_info: it makes a context on the GPU, which takes memory itself.
    try:
        return torch.cuda.device_memory_used(gpu)
    except ImportError:
        return None
