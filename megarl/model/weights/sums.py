# SPDX-License-Identifier: Apache-2.0
"""Add an adapter's update to a base weight: at once, or not before the weight is sent."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megarl.model.weights.sharded_tensor import ShardedTensor, Update
from megarl.triton_support import has_triton


def add_update(base: torch.Tensor, update: Update) -> torch.Tensor:
    """Return ``base + scaling * B @ A``, ``[out, in]``, as a new tensor: in float32, rounded once to base's dtype."""
    if base.is_cuda and base.ndim == 2 and has_triton():
        from megarl.model.weights.sum_kernel import add

        return add(base.detach(), update)
    delta = (update.matrix_b.detach().float() @ update.matrix_a.detach().float()) * update.scaling
    return (base.detach().float() + delta).to(base.dtype)


def with_update(base: ShardedTensor, update: Callable[[], Update]) -> ShardedTensor:
    """Return ``base`` whose ``read`` adds an update.

    Args:
        base: this rank's part of a weight.
        update: returns the factors of the same part. It is called by every read.
    """
    return dataclasses.replace(base, read=lambda: add_update(base.read(), update()), update=update)


@dataclass(frozen=True)
class Deferred:
    """A whole tensor, or some of its rows, that is neither copied nor added up before it is sent.

    Attributes:
        view: ``[segments, rows, columns]``, strided: the weight's rows are those of all segments. A vector has one
            column.
        shape: of the tensor, or of the rows; ``[rows]`` or ``[rows, columns]``.
        update: what is added, if anything.
        first: the first of the rows.
    """

    view: torch.Tensor
    shape: tuple[int, ...]
    update: Update | None = None
    first: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor."""
        return self.view.dtype

    @property
    def device(self) -> torch.device:
        """Device of the weight."""
        return self.view.device

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, or of the rows."""
        return torch.Size(self.shape).numel() * self.view.itemsize

    def __getitem__(self, rows: slice) -> "Deferred":
        """Return some rows."""
        begin, end, _ = rows.indices(self.shape[0])
        return dataclasses.replace(self, shape=(end - begin, *self.shape[1:]), first=self.first + begin)

    def value(self) -> torch.Tensor:
        """Return the tensor, or the rows; they may be a view of the weight."""
        rows = slice(self.first, self.first + self.shape[0])
        if len(self.shape) == 1:
            return self.view.reshape(-1)[rows]
        part = self.view.reshape(-1, self.view.shape[2])[rows]
        if self.update is None:
            return part
        return add_update(part, self.update._replace(matrix_b=self.update.matrix_b[rows]))

    def runs(self) -> list[torch.Tensor] | None:
        """Return views of the weight that make up the tensor, in order; None if it has to be computed or is empty."""
        if self.update is not None or not self.nbytes:
            return None
        if len(self.shape) == 1:
            return [self.value()] if self.view.is_contiguous() else None
        # The rows of each segment.
        height, last = self.view.shape[1], self.first + self.shape[0]
        bounds = [(max(self.first - top, 0), last - top) for top in range(0, len(self.view) * height, height)]
        return [part[low:high] for part, (low, high) in zip(self.view, bounds, strict=True) if low < min(high, height)]

    @staticmethod
    def writer(tensors: "Sequence[Deferred]", offsets: Sequence[int]) -> Callable[[torch.Tensor], Any]:
        """Return what writes tensors of one GPU into a buffer, ``[nbytes]`` uint8, while bases and factors stay there.

        Args:
            tensors: the tensors.
            offsets: their byte offsets in the buffer.
        """
        from megarl.model.weights.sum_kernel import Job, Sums

        return Sums([Job(*one._job(), offset) for one, offset in zip(tensors, offsets, strict=True)])

    def _job(self) -> tuple[torch.Tensor, Update | None, int, int]:
        """Return base, update, first row and rows."""
        if self.shape == (self.view.numel(),) and self.view.is_contiguous():
            return self.view.view(1, 1, -1), None, 0, 1  # a vector as one row
        return self.view, self.update, self.first, self.shape[0]


def deferred(tensors: Iterable[ShardedTensor]) -> tuple[tuple[str, Deferred], ...] | None:
    """Return all tensors with their names, to be read when they are sent; None if one cannot be.

    Args:
        tensors: tensors that this rank holds whole.
    """
    found = []
    for tensor in tensors:
        view = None if tensor.view is None else _segments(tensor.view.detach(), len(tensor.shape))
        if view is None:
            return None
        update = tensor.update() if tensor.update else None
        found.append((tensor.name, Deferred(view, tensor.shape, update)))
    return tuple(found)


def _segments(view: torch.Tensor, dimensions: int) -> torch.Tensor | None:
    """Return a view ``[segments, rows, columns]`` of a weight's part in a fused one; None if there is no such view."""
    if dimensions == 1:
        view = view.unsqueeze(-1)
    elif dimensions != 2:
        return None
    if view.ndim == 2:
        return view[None]
    try:
        return view.view(view.shape[0], -1, view.shape[-1])
    except RuntimeError:  # the strides allow none
        return None
