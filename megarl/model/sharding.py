"""One tensor, split over ranks: read and write this rank's part, load it from a file, export the whole."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megarl.parallel.groups import Axis, Groups, gather_full


class Sliceable(Protocol):
    """What ``safetensors.safe_open(...).get_slice(name)`` returns."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: Any) -> torch.Tensor: ...


@dataclass(frozen=True)
class ShardedTensor:
    """A Hugging Face or PEFT tensor of which this rank holds all or a part.

    Attributes:
        name: in the file.
        shape: of the whole tensor, as in the file.
        dtype: on this rank.
        dim: the dimension split over the ranks of ``axis``, or None if each of them holds all of it.
        read: returns this rank's part in the file's layout, contiguous or not.
        write: copies this rank's part in the file's layout into place.
        padded: size of ``dim`` after padding, where it exceeds ``shape[dim]`` (vocabularies); else None.
        axis: ``expert_tensor`` for the tensors of routed experts.
        owner: the expert-parallel rank that holds it, or None if all do. The others list it too, so that collectives
            meet, but must not read or write it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int | None
    read: Callable[[], torch.Tensor]
    write: Callable[[torch.Tensor], None]
    padded: int | None = None
    axis: Axis = "tensor"
    owner: int | None = None

    def held(self, groups: Groups) -> bool:
        """Whether this rank has (a part of) it."""
        return self.owner is None or self.owner == groups.expert_rank

    def local_slice(self, rank: int, size: int) -> tuple[slice, ...]:
        """Index of this rank's part within the file's tensor (padding excluded)."""
        index = [slice(None)] * len(self.shape)
        if self.dim is not None:
            step = (self.padded or self.shape[self.dim]) // size
            end = self.shape[self.dim]
            index[self.dim] = slice(min(rank * step, end), min((rank + 1) * step, end))
        return tuple(index)

    def load(self, source: Sliceable, groups: Groups) -> None:
        """Read only this rank's part of ``source`` and write it into place; padding rows become zero."""
        if not self.held(groups):
            return
        _, rank, size = groups.along(self.axis)
        part = source[self.local_slice(rank, size)]
        if self.padded is not None and self.dim is not None:
            missing = self.padded // size - part.shape[self.dim]
            if missing:
                part = torch.cat([part, part.new_zeros(missing, *part.shape[1:])], dim=0)
        self.write(part)

    def full(self, groups: Groups) -> torch.Tensor:
        """The whole tensor, on every rank of the pipeline stage; a collective over ``axis`` and, with an owner, EP."""
        if self.owner is not None and groups.topology.expert > 1:
            return self._from_owner(groups)
        return self._gathered(groups)

    def _from_owner(self, groups: Groups) -> torch.Tensor:
        if self.held(groups):
            whole = self._gathered(groups)
        else:
            whole = torch.empty(self.shape, dtype=self.dtype, device=groups.device)
        dist.broadcast(whole, dist.get_global_rank(groups.expert, self.owner), group=groups.expert)
        return whole

    def _gathered(self, groups: Groups) -> torch.Tensor:
        whole = gather_full(self.read().detach(), self.dim, groups.along(self.axis)[0])
        if self.padded is not None and self.dim is not None:
            whole = whole.narrow(self.dim, 0, self.shape[self.dim])
        return whole.contiguous()


def parameter_view(name: str, view: torch.Tensor, shape: tuple[int, ...], dim: int | None) -> ShardedTensor:
    """A ``ShardedTensor`` over a (view of a) parameter whose flattened rows are the file's.

    Args:
        name: in the file.
        view: this rank's part, possibly strided.
        shape: of the whole tensor in the file.
        dim: as in ``ShardedTensor``.
    """
    tail = shape[1:] if dim != 1 else (view.shape[-1],)

    def read() -> torch.Tensor:
        return view.reshape(-1, *tail)

    def write(part: torch.Tensor) -> None:
        with torch.no_grad():
            view.copy_(part.reshape(view.shape))

    return ShardedTensor(name, shape, view.dtype, dim, read, write)


def placed(tensor: ShardedTensor, axis: Axis, owner: int | None, groups: Groups) -> ShardedTensor:
    """The tensor with an axis and an owner; where it lies elsewhere, reading or writing it here raises."""
    tensor = dataclasses.replace(tensor, axis=axis, owner=owner)
    if tensor.held(groups):
        return tensor

    def elsewhere(*args: Any) -> Any:
        raise RuntimeError(f"'{tensor.name}' is on expert-parallel rank {owner}, not here ({groups.expert_rank})")

    return dataclasses.replace(tensor, read=elsewhere, write=elsewhere)


def stream_full(tensors: Iterable[ShardedTensor], groups: Groups) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of every pipeline stage, whole, on every rank, stage after stage.

    A collective over the tensor- and pipeline-parallel groups: every rank must consume it to the end. At most one
    whole tensor is alive at a time unless the caller keeps it.

    Args:
        tensors: this rank's; ranks of one stage hold the same names in the same order.
        groups: this rank's place.
    """
    own = list(tensors)
    for stage, records in enumerate(_records_of_stages(own, groups)):
        mine = stage == groups.pipeline_rank
        source = dist.get_global_rank(groups.pipeline, stage)
        for index, (name, shape, dtype) in enumerate(records):
            whole = own[index].full(groups) if mine else torch.empty(shape, dtype=dtype, device=groups.device)
            if groups.topology.pipeline > 1:
                dist.broadcast(whole, source, group=groups.pipeline)
            yield name, whole


def collect(stream: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Consume a stream of ``stream_full`` on every rank; copies on the CPU on global rank 0, nothing elsewhere."""
    keep = dist.get_rank() == 0
    return {name: tensor.to("cpu", copy=True) for name, tensor in stream if keep}


def _records_of_stages(
    own: list[ShardedTensor], groups: Groups
) -> list[list[tuple[str, tuple[int, ...], torch.dtype]]]:
    """Names, shapes and dtypes held by each pipeline stage."""
    records = [(tensor.name, tensor.shape, tensor.dtype) for tensor in own]
    if groups.topology.pipeline == 1:
        return [records]
    stages: list[Any] = [None] * groups.topology.pipeline
    dist.all_gather_object(stages, records, group=groups.pipeline)
    return stages
