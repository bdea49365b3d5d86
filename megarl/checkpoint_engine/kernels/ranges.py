# SPDX-License-Identifier: Apache-2.0
"""Digest many ranges of a buffer in one launch, or copy many tensors into their ranges and digest them on the way."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from megarl.checkpoint_engine.kernels.mix import mixed
from megarl.checkpoint_engine.wire import Places
from megarl.triton_support import program_table

# 64-bit words that a program reads at a time, and how often; bytes of a word.
BLOCK, LOOPS, WARPS, WORD = 1024, 8, 8, 8


class Table(NamedTuple):
    """The work of the programs, on the GPU; int64.

    Attributes:
        sources: ``[ranges]``: address of the tensor that is copied into each range, or of nothing.
        starts, sizes: ``[ranges]``: byte offset of each range from the start of the buffer, and its bytes.
        ranges, blocks: ``[programs]``: each program's range, and the index of its part of it.
    """

    sources: torch.Tensor
    starts: torch.Tensor
    sizes: torch.Tensor
    ranges: torch.Tensor
    blocks: torch.Tensor


def range_digests(payload: torch.Tensor, places: Places) -> torch.Tensor:
    """Return ``splitmix.mix64`` of each place in a buffer ``[nbytes]`` uint8: int64 ``[places]``, on its device."""
    return _run(payload, _known_table(places, payload.device), copy=False)


def copies(tensors: Sequence[torch.Tensor]) -> bool:
    """Return True if ``flatten`` can copy the tensors: they are contiguous, and their addresses multiples of 8."""
    return all(tensor.is_contiguous() and tensor.data_ptr() % WORD == 0 for tensor in tensors)


def flatten_table(places: Places, tensors: Sequence[torch.Tensor], device: torch.device) -> Table:
    """Return the table by which ``flatten`` copies tensors into their places, as long as they stay where they are.

    All but the tensors' addresses is kept from the first time on, and the host does not wait for the device.
    """
    addresses = torch.tensor([tensor.data_ptr() for tensor in tensors])
    if device.type == "cuda":
        addresses = addresses.pin_memory()
    return _known_table(places, device)._replace(sources=addresses.to(device, non_blocking=True))


def flatten(payload: torch.Tensor, table: Table) -> torch.Tensor:
    """Copy tensors into a buffer ``[nbytes]`` uint8; return their digests as ``range_digests``."""
    return _run(payload, table, copy=True)


def tensor_digests(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return ``splitmix.mix64`` of the bytes of tensors of one device, wherever they lie: int64 ``[tensors]``."""
    whole = [tensor if copies([tensor]) else tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
    first = whole[0].view(-1).view(torch.uint8)
    sizes = [tensor.nbytes for tensor in whole]
    starts = [tensor.data_ptr() - first.data_ptr() for tensor in whole]
    return _run(first, _build([0] * len(whole), starts, sizes, first.device), copy=False)


@lru_cache(maxsize=512)
def _known_table(places: Places, device: torch.device) -> Table:
    offsets, sizes = [place.offset for place in places], [place.nbytes for place in places]
    return _build([0] * len(places), offsets, sizes, device)


def _build(sources: list[int], starts: list[int], sizes: list[int], device: torch.device) -> Table:
    """Bring a table to the device in one copy."""
    given = [np.asarray(column, dtype=np.int64) for column in (sources, starts, sizes)]
    columns = [*given, *program_table(sizes, BLOCK * LOOPS * WORD)]
    whole = torch.from_numpy(np.concatenate(columns)).to(device)
    return Table(*whole.split([len(column) for column in columns]))


def _run(payload: torch.Tensor, table: Table, copy: bool) -> torch.Tensor:
    sums = torch.zeros(len(table.starts), dtype=torch.int64, device=payload.device)
    if programs := len(table.ranges):
        _sum_ranges[(programs,)](payload, *table, sums, COPY=copy, BLOCK=BLOCK, LOOPS=LOOPS, num_warps=WARPS)
    return sums


@triton.jit
def _sum_ranges(
    payload, sources, starts, sizes, ranges, blocks, sums,
    COPY: tl.constexpr, BLOCK: tl.constexpr, LOOPS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    number, block = tl.load(ranges + program), tl.load(blocks + program)
    size = tl.load(sizes + number)
    target = payload + tl.load(starts + number)
    source = tl.load(sources + number).to(tl.pointer_type(tl.uint8)) if COPY else target
    full = size // 8
    wide, out = source.to(tl.pointer_type(tl.int64)), target.to(tl.pointer_type(tl.int64))
    total = tl.zeros([BLOCK], tl.int64)
    for k in range(LOOPS):
        position = (block * LOOPS + k) * BLOCK + tl.arange(0, BLOCK)
        inside = position < full
        word = tl.load(wide + position, mask=inside, other=0)
        if COPY:
            tl.store(out + position, word, mask=inside)
        total += tl.where(inside, mixed(word, position), 0)
    result = tl.sum(total)
    if (block == 0) & (size % 8 != 0):
        byte = tl.arange(0, 8)
        there = byte < size % 8
        last = tl.load(source + full * 8 + byte, mask=there, other=0)
        if COPY:
            tl.store(target + full * 8 + byte, last, mask=there)
        word = tl.sum(last.to(tl.int64) << (8 * byte.to(tl.int64)))
        result += mixed(word, full)
    tl.atomic_add(sums + number, result)
