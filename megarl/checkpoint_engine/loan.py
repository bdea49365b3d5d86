# SPDX-License-Identifier: Apache-2.0
"""Say where a trainer rank holds its base weights, so that an engine on the same GPU can read them there."""

import pickle
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from megarl.checkpoint_engine.buckets.filling import DTYPES, Named
from megarl.cuda_memory import exported
from megarl.errors import WeightSyncError


@dataclass(frozen=True)
class Lent:
    """A tensor that lies in one piece.

    Attributes:
        name: Hugging Face's.
        dtype: its dtype (``"bfloat16"``).
        shape: its shape.
        memory: index of the piece of memory that it lies in.
        offset: its first byte there.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    memory: int
    offset: int


@dataclass(frozen=True)
class Loan:
    """Tensors that an engine may read. The trainer must keep them, unchanged, as long as the engine lives.

    Attributes:
        tensors: the tensors that lie in one piece.
        handles: of each piece of memory what ``cuda_memory.opened`` needs.
    """

    tensors: list[Lent]
    handles: list[bytes]

    def to_bytes(self) -> bytes:
        """Return the loan for another process of this host."""
        return pickle.dumps(self)

    @staticmethod
    def from_bytes(data: bytes) -> "Loan":
        """Return the loan that another process of this run has made."""
        return pickle.loads(data)


def lend(tensors: Iterable[Named], device: str = "cuda") -> Loan:
    """List tensors for an engine on the same GPU. What consists of several runs of bytes is left out.

    Args:
        tensors: (name, tensor) pairs.
        device: the type of device whose memory can be lent.

    Raises:
        WeightSyncError: a tensor is elsewhere, or none lies in one piece.
    """
    lent, pieces = list[Lent](), dict[int, tuple[int, torch.Tensor]]()
    for name, tensor in tensors:
        if tensor.device.type != device:
            raise WeightSyncError(
                f"sampler.share_base is true, but the trainer holds '{name}' in memory of {tensor.device}"
            )
        runs = [tensor] if isinstance(tensor, torch.Tensor) else tensor.runs() or []
        dtype = str(tensor.dtype).removeprefix("torch.")
        if len(runs) != 1 or not runs[0].is_contiguous() or dtype not in DTYPES:
            continue
        storage = runs[0].untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        number, _ = pieces.setdefault(storage.data_ptr(), (len(pieces), whole))
        offset = runs[0].storage_offset() * runs[0].itemsize
        lent.append(Lent(name, dtype, tuple(tensor.shape), number, offset))
    if not lent:
        raise WeightSyncError("sampler.share_base is true, but no base weight of the trainer lies in one piece")
    return Loan(lent, [exported(whole) for _, whole in pieces.values()])
