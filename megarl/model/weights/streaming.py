# SPDX-License-Identifier: Apache-2.0
"""Gather whole tensors from all ranks in buckets, because a mixture of experts has tens of thousands of small ones."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megarl.model.weights.sharded_tensor import ShardedTensor
from megarl.parallel.groups import Axis, Groups

# Size of whole tensors that travel together. A larger tensor travels alone.
BUCKET_BYTES = 64 * 2**20


@dataclass(frozen=True)
class _Record:
    """Facts that every pipeline stage needs to receive a tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    axis: Axis

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


def stream_full(tensors: Iterable[ShardedTensor], groups: Groups) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of every pipeline stage, whole, on every rank, stage after stage.

    A collective over the tensor-, expert- and pipeline-parallel groups: every rank must consume it to the end. About
    ``BUCKET_BYTES`` are alive at a time, plus what the caller keeps.

    Args:
        tensors: this rank's tensors. Ranks of one stage list the same names in the same order.
        groups: this rank's process groups.
    """
    local = list(tensors)
    for stage, records in enumerate(_records_of_stages(local, groups)):
        mine = stage == groups.pipeline_rank
        source = dist.get_global_rank(groups.pipeline, stage)
        for bucket in _buckets(records):
            wholes = whole_tensors([local[index] for index in bucket], groups) if mine else None
            chosen = [records[index] for index in bucket]
            if groups.topology.pipeline > 1:
                wholes = _from_stage(wholes, chosen, source, groups)
            assert wholes is not None
            for index in range(len(chosen)):
                yield chosen[index].name, wholes[index]


def whole_tensors(tensors: list[ShardedTensor], groups: Groups) -> list[torch.Tensor]:
    """Gather tensors on every rank of the pipeline stage: one collective over their axis, one over EP.

    Args:
        tensors: tensors of one dtype and one axis.
        groups: this rank's process groups.
    """
    whole: dict[int, torch.Tensor] = {}
    here = [index for index, tensor in enumerate(tensors) if tensor.held(groups)]
    parts = {index: tensors[index].read().detach() for index in here}
    group, _, size = groups.along(tensors[0].axis)
    split = [index for index in here if tensors[index].dim is not None and size > 1]
    gathered = _all_gather(_flat([parts[index] for index in split]), [None] * size, group) if split else []
    for index in here:
        part = parts[index].contiguous()
        whole[index] = _unpadded(part, tensors[index]) if size == 1 else part
    cuts = [parts[index].numel() for index in split]
    columns = [flat.split(cuts) for flat in gathered]
    for place, index in enumerate(split):
        pieces = [column[place].view(parts[index].shape) for column in columns[:: tensors[index].copies]]
        whole[index] = _unpadded(torch.cat(pieces, dim=tensors[index].dim), tensors[index])
    if any(tensor.owner is not None for tensor in tensors) and groups.topology.expert > 1:
        whole |= _from_owners(whole, tensors, groups)
    return [whole[index] for index in range(len(tensors))]


def _from_owners(whole: dict[int, torch.Tensor], tensors: list[ShardedTensor], groups: Groups) -> dict[int, Any]:
    """Exchange the tensors that each expert-parallel rank owns."""
    owned = [[i for i, tensor in enumerate(tensors) if tensor.owner == rank] for rank in range(groups.topology.expert)]
    sizes = [sum(torch.Size(tensors[i].shape).numel() for i in indices) for indices in owned]
    mine = _flat([whole[i] for i in owned[groups.expert_rank]], like=tensors[0], device=groups.device)
    flats = _all_gather(mine, list(sizes), groups.expert)
    received: dict[int, Any] = {}
    for indices, flat in zip(owned, flats, strict=True):
        shapes = [tensors[i].shape for i in indices]
        parts = flat.split([torch.Size(shape).numel() for shape in shapes])
        received |= {i: part.view(shape) for i, part, shape in zip(indices, parts, shapes, strict=True)}
    return received


def _from_stage(
    wholes: list[torch.Tensor] | None, records: list[_Record], source: int, groups: Groups
) -> list[torch.Tensor]:
    """Broadcast a bucket from one pipeline stage to all stages."""
    if wholes is None:
        total = sum(record.numel for record in records)
        flat = torch.empty(total, dtype=records[0].dtype, device=groups.device)
    else:
        flat = _flat(wholes)
    dist.broadcast(flat, source, group=groups.pipeline)
    parts = flat.split([record.numel for record in records])
    return [part.view(record.shape) for part, record in zip(parts, records, strict=True)]


def _flat(tensors: list[torch.Tensor], like: ShardedTensor | None = None, device: Any = None) -> torch.Tensor:
    """Concatenate all elements into one vector; without tensors, return an empty one of ``like``'s dtype."""
    if not tensors:
        assert like is not None
        return torch.empty(0, dtype=like.dtype, device=device)
    return tensors[0].reshape(-1) if len(tensors) == 1 else torch.cat([tensor.reshape(-1) for tensor in tensors])


def _all_gather(flat: torch.Tensor, sizes: list[int | None], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """All-gather the vectors of a group's ranks. ``sizes`` are their lengths; None where all are equal."""
    if len(sizes) == 1:
        return [flat]
    lengths = [flat.numel() if size is None else size for size in sizes]
    longest = max(lengths)
    if flat.numel() < longest:
        flat = torch.cat([flat, flat.new_empty(longest - flat.numel())])
    parts = [torch.empty_like(flat) for _ in lengths]
    dist.all_gather(parts, flat.contiguous(), group=group)
    return [part[:length] for part, length in zip(parts, lengths, strict=True)]


def _unpadded(whole: torch.Tensor, tensor: ShardedTensor) -> torch.Tensor:
    if tensor.padded is None or tensor.dim is None:
        return whole
    return whole.narrow(tensor.dim, 0, tensor.shape[tensor.dim]).contiguous()


def _buckets(records: list[_Record]) -> Iterator[list[int]]:
    """Yield runs of neighbours of one dtype and axis that add up to at most ``BUCKET_BYTES``."""
    kinds = itertools.groupby(range(len(records)), key=lambda index: (records[index].dtype, records[index].axis))
    for _, run in kinds:
        bucket: list[int] = []
        filled = 0
        for index in run:
            size = records[index].numel * records[index].dtype.itemsize
            if bucket and filled + size > BUCKET_BYTES:
                yield bucket
                bucket, filled = [], 0
            bucket.append(index)
            filled += size
        yield bucket


def _records_of_stages(local: list[ShardedTensor], groups: Groups) -> list[list[_Record]]:
    """Return the records that each pipeline stage lists."""
    records = [_Record(tensor.name, tensor.shape, tensor.dtype, tensor.axis) for tensor in local]
    if groups.topology.pipeline == 1:
        return [records]
    stages: list[Any] = [None] * groups.topology.pipeline
    dist.all_gather_object(stages, records, group=groups.pipeline)
    return stages
