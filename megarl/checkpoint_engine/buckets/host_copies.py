# SPDX-License-Identifier: Apache-2.0
"""Bring small results of a GPU's kernels to the host: all that are outstanding in one copy, when one is asked for.

A copy of its own for each would make the host wait, or allocate pinned memory, for every bucket of a transfer.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch


class _Result:
    """A tensor on a GPU, until it is on the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.arrived = tensor, not tensor.is_cuda
        # Of the copy that was begun before anybody asked.
        self.copied: torch.cuda.Event | None = None
        # Of one thread, since each has streams and transfers of its own.
        self.origin: Any = (threading.get_ident(), torch.cuda.current_stream(tensor.device)) if tensor.is_cuda else None

    def value(self) -> torch.Tensor:
        """Wait for the device, and return the tensor on the host."""
        if self.copied is not None:
            self.copied.synchronize()
            self.arrived, self.copied = True, None
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


def bring_early() -> None:
    """Begin to copy what this thread has outstanding on its current stream; whoever asks waits for the copy alone.

    A copy that is begun when somebody asks comes a launch and a wake-up later.
    """
    if not _outstanding:
        return
    origin = threading.get_ident(), torch.cuda.current_stream()
    with _lock:
        dtypes = {one.tensor.dtype for one in _outstanding if one.origin == origin}
    for dtype in dtypes:
        found = _take(origin, dtype)
        host = torch.empty(sum(one.tensor.numel() for one in found), dtype=dtype, pin_memory=True)
        copied = torch.cuda.Event()
        for one, part in _parts(found, host):
            # Each by itself: to launch the kernel that joins two takes longer than to copy both.
            one.tensor, one.copied = part.copy_(one.tensor, non_blocking=True), copied
        copied.record()


def _fetch(asked: _Result) -> None:
    """Bring a result to the host, and with it all others of the same thread, stream and dtype."""
    found = _take(asked.origin, asked.tensor.dtype)
    with torch.cuda.stream(asked.origin[1]):
        whole = torch.cat([one.tensor.reshape(-1) for one in found]).cpu()
    for one, part in _parts(found, whole):
        one.tensor, one.arrived = part, True


def _take(origin: Any, dtype: torch.dtype) -> list[_Result]:
    """Return the outstanding results of a thread and stream; they are no longer outstanding."""
    with _lock:
        found = [one for one in _outstanding if one.origin == origin and one.tensor.dtype == dtype]
        _outstanding.difference_update(found)
    return found


def _parts(results: list[_Result], whole: torch.Tensor) -> Iterator[tuple[_Result, torch.Tensor]]:
    """Yield each result with its part of all values."""
    sizes = [one.tensor.numel() for one in results]
    for one, part in zip(results, whole.split(sizes), strict=True):
        yield one, part.view(one.tensor.shape)
