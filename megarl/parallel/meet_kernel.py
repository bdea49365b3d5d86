# SPDX-License-Identifier: Apache-2.0
"""Let the streams of several GPUs wait for each other. Import it only where it runs: on CUDA, with Triton."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


def meet(flags: torch.Tensor, rank: int, channel: int, seconds: float) -> None:
    """Hold the current stream until every rank's has come here; what they wrote before can then be read.

    Each pair of ranks has two flags: a rank raises the peer's, which must be down, and lowers its own once that is up.
    So all flags are down again when everybody has met, also if the kernel is replayed in a CUDA graph. Only one rank
    may change a flag at any time, so it works between GPUs whose atomic operations on each other are none.

    Args:
        flags: int64 ``[ranks]``, the address of each rank's flags, int32 ``[channels, ranks]``; zeros at first.
        rank: this rank's index.
        channel: streams that meet at the same time have channels of their own.
        seconds: how long to wait. Then the kernel fails, and with it this process's CUDA context.
    """
    ranks = len(flags)
    _meet[(ranks,)](flags, rank, channel * ranks, int(seconds * 1e9), num_warps=1)


@triton.jit
def _meet(flags, rank, first, limit):
    peer = tl.program_id(0)
    theirs = tl.load(flags + peer).to(tl.pointer_type(tl.int32)) + first + rank
    mine = tl.load(flags + rank).to(tl.pointer_type(tl.int32)) + first + peer
    end = globaltimer() + limit
    _change(theirs, 0, 1, end)
    _change(mine, 1, 0, end)


@triton.jit
def _change(flag, before, after, end):
    """Change a flag from one value to another, as soon as it has the first."""
    old = tl.full([], 0, tl.int32) + before
    new = tl.full([], 0, tl.int32) + after
    seen = tl.atomic_cas(flag, old, new, sem="acq_rel", scope="sys")
    while seen != old:
        if globaltimer() > end:
            tl.inline_asm_elementwise("trap; mov.u32 $0, $1;", "=r,r", [seen], dtype=tl.int32, is_pure=False, pack=1)
        seen = tl.atomic_cas(flag, old, new, sem="acq_rel", scope="sys")
