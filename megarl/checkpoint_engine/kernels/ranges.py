# SPDX-License-Identifier: Apache-2.0
"""Digest many ranges of memory in one launch. The same launch can copy them, and count values that are not finite."""

from collections.abc import Iterator, Sequence
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
# Of two or four values in a word: the bits of their exponents, and those of their signs.
_EXPONENTS: dict[torch.dtype | None, tuple[int, int]] = {
    torch.float32: (0x7F800000_7F800000, 0x80000000_80000000),
    torch.float16: (0x7C007C00_7C007C00, 0x80008000_80008000),
    torch.bfloat16: (0x7F807F80_7F807F80, 0x80008000_80008000),
}


class Range(NamedTuple):
    """Some bytes of a tensor.

    Attributes:
        source: where they are: an address, or an offset in the buffer; a multiple of ``WORD``.
        target: where they are copied to, alike; 0 among addresses is nowhere.
        nbytes: their number; a multiple of ``WORD`` unless they end the tensor.
        first: offset of the first one in the tensor; a multiple of ``WORD``.
        dtype: the tensor's, if values that are not finite are to be counted.
    """

    source: int
    target: int
    nbytes: int
    first: int = 0
    dtype: torch.dtype | None = None


class Table(NamedTuple):
    """Ranges on the GPU, and the work of the programs; int64.

    Attributes:
        sources, targets, sizes: ``[ranges]``, see ``Range``.
        firsts: ``[ranges]``: position of the first word in the tensor.
        exponents, signs: ``[ranges]``: which bits of a word belong to exponents, and to signs; 0 counts nothing.
        ranges, blocks: ``[programs]``: each program's range, and the index of its part of it.
    """

    sources: torch.Tensor
    targets: torch.Tensor
    sizes: torch.Tensor
    firsts: torch.Tensor
    exponents: torch.Tensor
    signs: torch.Tensor
    ranges: torch.Tensor
    blocks: torch.Tensor


def table_of(ranges: Sequence[Range], device: torch.device) -> Table:
    """Bring ranges to the device in one copy."""
    bits = [_EXPONENTS.get(one.dtype, (0, 0)) for one in ranges]
    columns = [
        [one.source for one in ranges],
        [one.target for one in ranges],
        sizes := [one.nbytes for one in ranges],
        [one.first // WORD for one in ranges],
        *([pair[i] for pair in bits] for i in range(2)),
    ]
    given = [np.asarray(column, dtype=np.uint64).view(np.int64) for column in columns]
    given.extend(program_table(sizes, BLOCK * LOOPS * WORD))
    whole = torch.from_numpy(np.concatenate(given)).to(device)
    return Table(*whole.split([len(column) for column in given]))


def read_back_table(ranges: Sequence[Range], table: Table) -> Table:
    """Return the table that reads the targets of ranges; those that have none are left out.

    Args:
        ranges: the ranges, with all targets to read.
        table: their table; it may write to fewer.
    """
    sizes = [one.nbytes if one.target else 0 for one in ranges]
    targets = np.asarray([one.target for one in ranges], dtype=np.uint64).view(np.int64)
    columns = targets, *program_table(sizes, BLOCK * LOOPS * WORD)
    sources, chosen, blocks = (torch.from_numpy(column).to(table.sizes.device) for column in columns)
    return table._replace(sources=sources, ranges=chosen, blocks=blocks)


def range_digests(payload: torch.Tensor, places: Places) -> torch.Tensor:
    """Return ``splitmix.mix64`` of each place in a buffer ``[nbytes]`` uint8: int64 ``[places]``, on its device."""
    return digests_by(payload, known_table(places, payload.device))


def digests_by(payload: torch.Tensor, table: Table) -> torch.Tensor:
    """Return what ``range_digests`` does, by the places' ``known_table``."""
    return _run(payload, table, _sums(table), None, read="buffer", write=None)


def copies(runs: Sequence[torch.Tensor]) -> bool:
    """Return True if the kernel can read a tensor that consists of these parts, in order.

    Each must be contiguous, its address a multiple of 8, and so its bytes but for the last one's.
    """
    whole = all(part.is_contiguous() and part.data_ptr() % WORD == 0 for part in runs)
    return whole and all(part.nbytes % WORD == 0 for part in runs[:-1])


def flatten_table(places: Places, runs: Sequence[Sequence[torch.Tensor]], device: torch.device) -> Table:
    """Return the table by which ``flatten`` copies tensors into their places, as long as they stay where they are.

    Where each tensor is one run, all but the addresses is kept from the first time on, and the host does not wait for
    the device.

    Args:
        places: the places.
        runs: of each tensor the parts that it consists of, in order; all of them ``copies``.
        device: where they are.
    """
    if any(len(parts) != 1 for parts in runs):
        return table_of(list(_ranges_of(places, runs)), device)
    addresses = torch.tensor([part.data_ptr() for [part] in runs])
    if device.type == "cuda":
        addresses = addresses.pin_memory()
    return known_table(places, device)._replace(sources=addresses.to(device, non_blocking=True))


def flatten(payload: torch.Tensor, table: Table) -> torch.Tensor:
    """Copy ranges into a buffer ``[nbytes]`` uint8; return their digests, int64 ``[ranges]``."""
    return _run(payload, table, _sums(table), None, read="address", write="buffer")


def copy_out(payload: torch.Tensor, table: Table, back: Table) -> torch.Tensor:
    """Copy ranges of a buffer to their targets, and read those once more.

    Args:
        payload: the buffer, ``[nbytes]`` uint8.
        table: the ranges.
        back: their ``read_back_table``.

    Returns:
        int64 ``[3, ranges]``: digests of what was in the buffer, and of what the targets hold; words with a value that
        is not finite.
    """
    result = _sums(table, 3)
    _run(payload, table, result[0], result[2], read="buffer", write="address")
    _run(payload, back, result[1], None, read="address", write=None)
    return result


def tensor_digests(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return ``splitmix.mix64`` of the bytes of tensors of one device, wherever they lie: int64 ``[tensors]``."""
    whole = [tensor if copies([tensor]) else tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
    first = whole[0].view(-1).view(torch.uint8)
    table = table_of([Range(tensor.data_ptr(), 0, tensor.nbytes) for tensor in whole], first.device)
    return _run(first, table, _sums(table), None, read="address", write=None)


def _ranges_of(places: Places, runs: Sequence[Sequence[torch.Tensor]]) -> Iterator[Range]:
    for place, parts in zip(places, runs, strict=True):
        done = 0
        for part in parts:
            yield Range(part.data_ptr(), place.offset + done, part.nbytes, done)
            done += part.nbytes


@lru_cache(maxsize=512)
def known_table(places: Places, device: torch.device) -> Table:
    """Return the table of a bucket's places."""
    return table_of([Range(place.offset, place.offset, place.nbytes) for place in places], device)


def _sums(table: Table, *rows: int) -> torch.Tensor:
    """Return zeros, int64 ``[*rows, ranges]``, to which a launch adds."""
    return torch.zeros(*rows, len(table.sizes), dtype=torch.int64, device=table.sizes.device)


def _run(
    payload: torch.Tensor, table: Table, sums: torch.Tensor, odd: torch.Tensor | None, *, read: str, write: str | None
) -> torch.Tensor:
    """Launch the kernel, if there is work for it.

    Args:
        payload: the buffer.
        table: the work.
        sums: the digests are added to these.
        odd: numbers of words with values that are not finite are added to these, if given.
        read, write: whether sources and targets are an "address" or in the "buffer"; None writes nothing.
    """
    if programs := len(table.ranges):
        _sum_ranges[(programs,)](
            payload, *table, sums, sums if odd is None else odd, FROM_BUFFER=read == "buffer", COPY=write is not None,
            TO_BUFFER=write == "buffer", COUNT=odd is not None, BLOCK=BLOCK, LOOPS=LOOPS, num_warps=WARPS,
        )  # fmt: skip
    return sums


@triton.jit
def _sum_ranges(
    payload, sources, targets, sizes, firsts, exponents, signs, ranges, blocks, sums, odd,
    FROM_BUFFER: tl.constexpr, COPY: tl.constexpr, TO_BUFFER: tl.constexpr, COUNT: tl.constexpr,
    BLOCK: tl.constexpr, LOOPS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    number, block = tl.load(ranges + program), tl.load(blocks + program)
    size, first = tl.load(sizes + number), tl.load(firsts + number)
    given, wanted = tl.load(sources + number), tl.load(targets + number)
    source = payload + given if FROM_BUFFER else given.to(tl.pointer_type(tl.uint8))
    target = payload + wanted if TO_BUFFER else wanted.to(tl.pointer_type(tl.uint8))
    exponent, sign = tl.load(exponents + number), tl.load(signs + number)
    full, tail = size // 8, size % 8
    kept, rest = full, tail
    if not TO_BUFFER:
        kept, rest = tl.where(wanted != 0, full, 0), tl.where(wanted != 0, tail, 0)
    wide, out = source.to(tl.pointer_type(tl.int64)), target.to(tl.pointer_type(tl.int64))
    total = tl.zeros([BLOCK], tl.int64)
    bad = tl.zeros([BLOCK], tl.int32)
    for k in range(LOOPS):
        position = (block * LOOPS + k) * BLOCK + tl.arange(0, BLOCK)
        inside = position < full
        word = tl.load(wide + position, mask=inside, other=0)
        if COPY:
            tl.store(out + position, word, mask=position < kept)
        total += tl.where(inside, mixed(word, position + first), 0)
        if COUNT:
            bad += _not_finite(word, exponent, sign)
    result = tl.sum(total)
    if (block == 0) & (tail != 0):
        byte = tl.arange(0, 8)
        last = tl.load(source + full * 8 + byte, mask=byte < tail, other=0)
        if COPY:
            tl.store(target + full * 8 + byte, last, mask=byte < rest)
        word = tl.sum(last.to(tl.int64) << (8 * byte.to(tl.int64)))
        result += mixed(word, full + first)
        if COUNT:
            tl.atomic_add(odd + number, _not_finite(word, exponent, sign).to(tl.int64))
    tl.atomic_add(sums + number, result)
    if COUNT:
        found = tl.sum(bad)
        if found > 0:
            tl.atomic_add(odd + number, found.to(tl.int64))


@triton.jit
def _not_finite(word, exponent, sign):
    """Return 1 for each word in which all bits of an exponent are set."""
    # Zero where they are; else adding all bits but the sign's carries into the sign's.
    lacking = (word & exponent) ^ exponent
    return (((lacking + ~sign) & sign) != sign).to(tl.int32)
