# SPDX-License-Identifier: Apache-2.0
"""Digest many ranges of a buffer in one launch."""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from megarl.checkpoint_engine.kernels.mix import mixed, program_table
from megarl.checkpoint_engine.wire import Places

# 16-bit words that one program reads.
BLOCK, WARPS = 4096, 8


class _Table(NamedTuple):
    """The ranges' places, on the GPU: words before each range, words in it; each program's range and block."""

    starts: torch.Tensor
    lengths: torch.Tensor
    ranges: torch.Tensor
    blocks: torch.Tensor


def range_digests(payload: torch.Tensor, places: Places) -> bytes:
    """Return ``splitmix.mix64`` of each place in a buffer ``[nbytes]`` uint8, 8 bytes each; waits for the buffer."""
    table = _table(places, payload.device)
    sums = torch.zeros(len(places), dtype=torch.int64, device=payload.device)
    if len(table.ranges):
        _sum_ranges[(len(table.ranges),)](payload.view(torch.int16), *table, sums, BLOCK=BLOCK, num_warps=WARPS)
    return sums.cpu().numpy().tobytes()


@lru_cache(maxsize=64)
def _table(places: Places, device: torch.device) -> _Table:
    starts, lengths = [place.offset // 2 for place in places], [place.nbytes // 2 for place in places]
    ranges, blocks = program_table(lengths, BLOCK)
    return _Table(*(torch.tensor(column, device=device) for column in (starts, lengths, ranges, blocks)))


@triton.jit
def _sum_ranges(words, starts, lengths, ranges, blocks, sums, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    number = tl.load(ranges + program)
    position = tl.load(blocks + program) * BLOCK + tl.arange(0, BLOCK)
    inside = position < tl.load(lengths + number)
    word = tl.load(words + tl.load(starts + number) + position, mask=inside, other=0)
    key = (position.to(tl.uint64) << 16) + word.to(tl.uint16, bitcast=True).to(tl.uint64)
    tl.atomic_add(sums + number, tl.sum(tl.where(inside, mixed(key), 0)))
