# SPDX-License-Identifier: Apache-2.0
"""Let other processes of this host open memory of this process's GPU, by CUDA IPC; move tensors from and to hosts."""

import pickle
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate

import torch

# Position of the device's index in the arguments of torch's ``rebuild_cuda_tensor``.
DEVICE = 6
# Bytes to which the tensors of one copy are aligned; those of the largest dtype.
ALIGNED = 16
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


def upload_together(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return contiguous host tensors on a device, as ``upload`` does, but by one copy, and in one piece of memory.

    To begin a copy takes the host microseconds, in which a GPU may have nothing to do.
    """
    starts = list(accumulate((-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor in tensors), initial=0))
    joined = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")

    def views(whole: torch.Tensor) -> list[torch.Tensor]:
        pieces = zip(starts, tensors, strict=False)
        return [whole[start : start + one.nbytes].view(one.dtype).view(one.shape) for start, one in pieces]

    for view, tensor in zip(views(joined), tensors, strict=True):
        view.copy_(tensor)
    return views(joined.to(device, non_blocking=True))
