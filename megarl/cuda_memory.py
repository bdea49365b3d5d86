# SPDX-License-Identifier: Apache-2.0
"""Let other processes of this host open memory of this process's GPU, by CUDA IPC; move tensors from and to hosts."""

import pickle
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch

# Position of the device's index in the arguments of torch's ``rebuild_cuda_tensor``.
DEVICE = 6
# Bytes to which the tensors of one copy are aligned; those of the largest dtype.
ALIGNED = 16
# numpy's dtype -> torch's.
TORCH_TYPES: dict[Any, torch.dtype] = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.bool_): torch.bool,
}
# What a process offers to the others, to see whether they can read it.
WORD = 0x6D656761726C


def exported(buffer: torch.Tensor) -> bytes:
    """Return what ``opened`` needs. The buffer must live as long as it is open anywhere."""
    from torch.multiprocessing.reductions import reduce_tensor

    return pickle.dumps(reduce_tensor(buffer)[1])


def opened(handle: bytes) -> torch.Tensor:
    """Open another process's memory for this process's current GPU, which may be another one.

    Raises:
        RuntimeError: this GPU cannot map that one's memory.
    """
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    arguments = list(pickle.loads(handle))
    # The sender may count its GPUs otherwise, and have another one: then this GPU reads it over their link.
    arguments[DEVICE] = torch.cuda.current_device()
    return rebuild_cuda_tensor(*arguments)


@cache
def _offered(device: int) -> torch.Tensor:
    """Return the word that this process offers; kept, because others may open it."""
    word = torch.full((1,), WORD, dtype=torch.int64, device=f"cuda:{device}")
    torch.cuda.synchronize()
    return word


def offer() -> bytes:
    """Return the handle of a word of this process's GPU; empty without a GPU, or if it lends no memory."""
    if not torch.cuda.is_available():
        return b""
    try:
        return exported(_offered(torch.cuda.current_device()))
    except RuntimeError:
        return b""


def reads(handle: bytes) -> bool:
    """Return True if this process's GPU reads the word that another process of this host offers."""
    if not handle or not torch.cuda.is_available():
        return False
    try:
        return bool(opened(handle).clone().item() == WORD)
    except RuntimeError:
        return False


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a host tensor on a device. A GPU gets it from pinned memory, so that the host does not wait for it.

    From other memory CUDA copies larger tensors only once it has done all that was launched before.
    """
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def download(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start to bring a tensor to the host behind the work that is launched; return what waits for it and returns it."""
    if not tensor.is_cuda:
        return lambda: tensor
    there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    done = torch.cuda.Event()
    done.record()

    def wait() -> torch.Tensor:
        done.synchronize()
        return there

    return wait


class Upload:
    """Host arrays that go to a device by one copy, and lie there in one piece of memory.

    To begin a copy takes the host microseconds, in which a GPU may have nothing to do.

    Attributes:
        arrays: to be filled; then call ``send``.
    """

    def __init__(self, sizes: Sequence[tuple[int, Any]], device: torch.device) -> None:
        """Make arrays, with unset values, of so many elements and these dtypes (of ``TORCH_TYPES``)."""
        self._device, self._types = device, [np.dtype(dtype) for _, dtype in sizes]
        lengths = [count * dtype.itemsize for (count, _), dtype in zip(sizes, self._types, strict=True)]
        starts = list(accumulate((-(-length // ALIGNED) * ALIGNED for length in lengths), initial=0))
        self._joined = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._parts = [slice(start, start + length) for start, length in zip(starts, lengths, strict=False)]
        whole = self._joined.numpy()
        self.arrays = [whole[part].view(dtype) for part, dtype in zip(self._parts, self._types, strict=True)]

    def send(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the whole memory on the device, uint8, and the arrays there. They must not change afterwards."""
        there = self._joined.to(self._device, non_blocking=True)
        parts = zip(self._parts, self._types, strict=True)
        return there, [there[part].view(TORCH_TYPES[dtype]) for part, dtype in parts]


def upload_together(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Return one-dimensional arrays on a device, by one copy; see ``Upload``."""
    together = Upload([(len(array), array.dtype) for array in arrays], device)
    for target, array in zip(together.arrays, arrays, strict=True):
        target[:] = array
    return together.send()[1]
