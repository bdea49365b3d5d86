# SPDX-License-Identifier: Apache-2.0
"""Read and write this rank's part of a tensor that is split over ranks, and load it from a file."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from megarl.parallel.groups import Axis, Groups


class Sliceable(Protocol):
    """Interface of ``safetensors.safe_open(...).get_slice(name)``."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: Any) -> torch.Tensor: ...


class Update(NamedTuple):
    """Update of a weight ``[out, in]``, or of a part of it, by an adapter: it adds ``scaling * B @ A``.

    Attributes:
        matrix_a: ``[r, in]``.
        matrix_b: ``[out, r]``.
        scaling: alpha / r or alpha / sqrt(r).
    """

    matrix_a: torch.Tensor
    matrix_b: torch.Tensor
    scaling: float


@dataclass(frozen=True)
class ShardedTensor:
    """A Hugging Face or PEFT tensor of which this rank holds all or a part.

    Attributes:
        name: name in the file.
        shape: shape of the whole tensor in the file.
        dtype: dtype on this rank.
        dim: dimension that is split over the ranks of ``axis``; None if each of them holds all of it.
        read: returns this rank's part in the file's layout, contiguous or not.
        write: copies a tensor in the file's layout into this rank's part.
        padded: size of ``dim`` after padding, where it exceeds ``shape[dim]`` (vocabularies); else None.
        axis: parallel axis of the split; ``expert_tensor`` for routed experts.
        owner: expert-parallel rank that holds the tensor; None if all do. The other ranks list it too, so that
            collectives match, but must not read or write it.
        copies: number of neighbouring ranks of ``axis`` that hold the same part (KV heads, where there are more ranks
            than heads).
        view: what ``read`` reads, in the layout of the model; None if it is computed.
        update: what ``read`` adds to it, if anything.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int | None
    read: Callable[[], torch.Tensor]
    write: Callable[[torch.Tensor], None]
    padded: int | None = None
    axis: "Axis" = "tensor"
    owner: int | None = None
    copies: int = 1
    view: torch.Tensor | None = None
    update: Callable[[], Update] | None = None

    def held(self, groups: "Groups") -> bool:
        """Return True if this rank holds (a part of) the tensor."""
        return self.owner is None or self.owner == groups.expert_rank

    def local_slice(self, rank: int, size: int) -> tuple[slice, ...]:
        """Return the index of this rank's part within the file's tensor, without padding."""
        index = [slice(None)] * len(self.shape)
        rank, size = rank // self.copies, size // self.copies
        if self.dim is not None:
            step = (self.padded or self.shape[self.dim]) // size
            end = self.shape[self.dim]
            index[self.dim] = slice(min(rank * step, end), min((rank + 1) * step, end))
        return tuple(index)

    def load(self, source: Sliceable, groups: "Groups") -> None:
        """Read this rank's part of ``source`` and write it into place. Padding rows become zero."""
        if not self.held(groups):
            return
        _, rank, size = groups.along(self.axis)
        part = source[self.local_slice(rank, size)]
        if self.padded is not None and self.dim is not None:
            missing = self.padded // size - part.shape[self.dim]
            if missing:
                zeros = part.new_zeros([missing if d == self.dim else n for d, n in enumerate(part.shape)])
                part = torch.cat([part, zeros], dim=self.dim)
        self.write(part)


def parameter_view(name: str, view: torch.Tensor, shape: tuple[int, ...], dim: int | None) -> ShardedTensor:
    """Return a ``ShardedTensor`` over a (view of a) parameter whose flattened rows are the file's rows.

    Args:
        name: name in the file.
        view: this rank's part, possibly strided.
        shape: shape of the whole tensor in the file.
        dim: as in ``ShardedTensor``.
    """
    tail = shape[1:] if dim != 1 else (view.shape[-1],)

    def read() -> torch.Tensor:
        return view.reshape(-1, *tail)

    def write(part: torch.Tensor) -> None:
        with torch.no_grad():
            view.copy_(part.reshape(view.shape))

    return ShardedTensor(name, shape, view.dtype, dim, read, write, view=view)


def placed(tensor: ShardedTensor, axis: "Axis", owner: int | None, groups: "Groups") -> ShardedTensor:
    """Return the tensor with an axis and an owner. On ranks that do not hold it, reading or writing it raises."""
    tensor = dataclasses.replace(tensor, axis=axis, owner=owner)
    if tensor.held(groups):
        return tensor

    def elsewhere(*args: Any) -> Any:
        raise RuntimeError(f"'{tensor.name}' is on expert-parallel rank {owner}, not here ({groups.expert_rank})")

    return dataclasses.replace(tensor, read=elsewhere, write=elsewhere, view=None)


def collect(stream: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Consume a stream of ``stream_full`` on every rank; global rank 0 returns CPU copies, the others an empty dict."""
    keep = dist.get_rank() == 0
    return {name: tensor.to("cpu", copy=True) for name, tensor in stream if keep}
