# SPDX-License-Identifier: Apache-2.0
"""Say where a trainer rank holds its base weights, so that an engine's worker on the same GPU can read them there."""

import math
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megarl.checkpoint_engine.buckets.filling import DTYPES
from megarl.checkpoint_engine.choice import Memory, own_memory
from megarl.cuda_memory import exported
from megarl.errors import WeightSyncError


class Held(NamedTuple):
    """A weight, or the part of it that a trainer rank holds.

    Attributes:
        name: Hugging Face's.
        shape: of the whole weight.
        part: of each dimension what the rank holds, without a step.
        view: the part in the rank's memory, in any number of dimensions; rows beyond the part are padding.
    """

    name: str
    shape: tuple[int, ...]
    part: tuple[slice, ...]
    view: torch.Tensor


@dataclass(frozen=True)
class Lent:
    """A weight, or a part of it, that lies in one piece.

    The part is one of a matrix: of the weight's last dimension, and of all before it as one.

    Attributes:
        name: Hugging Face's.
        dtype: its dtype (``"bfloat16"``).
        shape: of the whole weight.
        memory: index of the piece of memory that the part lies in.
        offset: its first byte there.
        start: the part's first row and column.
        size: its rows and columns.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    memory: int
    offset: int
    start: tuple[int, int]
    size: tuple[int, int]


@dataclass(frozen=True)
class Loan:
    """Weights that an engine's worker may read. The trainer must keep them, unchanged, as long as the engine lives.

    Attributes:
        tensors: what lies in one piece.
        handles: of each piece of memory what ``cuda_memory.opened`` needs.
        place: the memory that they are in.
    """

    tensors: list[Lent]
    handles: list[bytes]
    place: Memory

    def to_bytes(self) -> bytes:
        """Return the loan for another process of this host."""
        return pickle.dumps([self])


def joined(loans: Sequence[bytes]) -> bytes:
    """Return the loan of an engine of several GPUs.

    Args:
        loans: what ``lend_base`` returned on the trainer rank of each of them, in the order of the engine's GPUs.
    """
    return loans[0] if len(loans) == 1 else pickle.dumps([one for loan in loans for one in loans_of(loan)])


def loans_of(data: bytes) -> list[Loan]:
    """Return the loan of each worker, which processes of this run have made."""
    return pickle.loads(data)


def lend(weights: Iterable[Held], device: str = "cuda") -> Loan:
    """List weights for a worker on the same GPU. What does not lie in one piece is left out.

    Args:
        weights: what the rank holds.
        device: the type of device whose memory can be lent.

    Raises:
        WeightSyncError: a weight is elsewhere, or none lies in one piece.
    """
    lent, pieces = list[Lent](), dict[int, tuple[int, torch.Tensor]]()
    for name, shape, part, view in weights:
        if view.device.type != device:
            raise WeightSyncError(
                f"sampler.share_base is true, but the trainer holds '{name}' in memory of {view.device}"
            )
        dtype, (start, size) = str(view.dtype).removeprefix("torch."), _in_matrix(shape, part)
        if not view.is_contiguous() or dtype not in DTYPES or view.numel() < math.prod(size) or not math.prod(size):
            continue
        storage = view.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=view.device).set_(storage)
        number, _ = pieces.setdefault(storage.data_ptr(), (len(pieces), whole))
        lent.append(Lent(name, dtype, shape, number, view.storage_offset() * view.itemsize, start, size))
    if not lent:
        raise WeightSyncError("sampler.share_base is true, but no base weight of the trainer lies in one piece")
    return Loan(lent, [exported(whole) for _, whole in pieces.values()], own_memory())


def _in_matrix(shape: tuple[int, ...], part: tuple[slice, ...]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return first row and column, and rows and columns, of a part of which only first or last dimension is cut."""
    if not shape:
        return (0, 0), (1, 1)
    bounds = [one.indices(size)[:2] for one, size in zip(part, shape, strict=True)]
    (begin, end), between = bounds[-1], math.prod(shape[1:-1])
    if len(shape) == 1:
        return (0, begin), (1, end - begin)
    first, last = bounds[0]
    return (first * between, begin), ((last - first) * between, end - begin)
