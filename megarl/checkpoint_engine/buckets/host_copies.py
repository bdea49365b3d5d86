# SPDX-License-Identifier: Apache-2.0
"""Bring small results of a GPU's kernels to the host: all that are outstanding in one copy, when one is asked for.

A copy of its own for each would make the host wait, or allocate pinned memory, for every bucket of a transfer.
"""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch


class _Result:
    """A tensor on a GPU, until it is on the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.arrived = tensor, not tensor.is_cuda
        # Of one thread, since each has streams and transfers of its own.
        self.origin: Any = (threading.get_ident(), torch.cuda.current_stream(tensor.device)) if tensor.is_cuda else None

    def value(self) -> torch.Tensor:
        """Wait for the device, and return the tensor on the host."""
        if not self.arrived:
            _fetch(self)
        return self.tensor


# Those that nobody refers to any more disappear by themselves.
_outstanding: "weakref.WeakSet[_Result]" = weakref.WeakSet()
_lock = threading.Lock()


def to_host(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return what waits for a tensor that the current stream computes, and returns it on the host."""
    result = _Result(tensor)
    if not result.arrived:
        with _lock:
            _outstanding.add(result)
    return result.value


def _fetch(asked: _Result) -> None:
    """Bring a result to the host, and with it all others of the same thread, stream and dtype."""
    with _lock:
        found = [one for one in _outstanding if one.origin == asked.origin and one.tensor.dtype == asked.tensor.dtype]
        _outstanding.difference_update(found)
    with torch.cuda.stream(asked.origin[1]):
        whole = torch.cat([one.tensor.reshape(-1) for one in found]).cpu()
    for one, part in zip(found, whole.split([one.tensor.numel() for one in found]), strict=True):
        one.tensor, one.arrived = part.view(one.tensor.shape), True
