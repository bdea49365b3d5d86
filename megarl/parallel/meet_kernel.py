# SPDX-License-Identifier: Apache-2.0
"""Let the streams of several GPUs wait for each other. Import it only where it runs: on CUDA, with Triton."""

import torch
import triton
import triton.language as tl


def meet(flags: torch.Tensor, rank: int, channel: int) -> None:
    """Hold the current stream until every rank's has come here; what they wrote before can then be read.

    Each pair of ranks has two flags: a rank raises the peer's, which must be down, and lowers its own once that is up.
    So all flags are down again when everybody has met, also if the kernel is replayed in a CUDA graph.

    Args:
        flags: int64 ``[ranks]``, the address of each rank's flags, int32 ``[channels, ranks]``; zeros at first.
        rank: this rank's index.
        channel: streams that meet at the same time have channels of their own.
    """
    ranks = len(flags)
    _meet[(ranks,)](flags, rank, channel * ranks, num_warps=1)


@triton.jit
def _meet(flags, rank, first):
    peer = tl.program_id(0)
    down = tl.full([], 0, tl.int32)
    up = tl.full([], 1, tl.int32)
    theirs = tl.load(flags + peer).to(tl.pointer_type(tl.int32)) + first + rank
    mine = tl.load(flags + rank).to(tl.pointer_type(tl.int32)) + first + peer
    seen = tl.atomic_cas(theirs, down, up, sem="release", scope="sys")
    while seen != 0:
        seen = tl.atomic_cas(theirs, down, up, sem="release", scope="sys")
    seen = tl.atomic_cas(mine, up, down, sem="acquire", scope="sys")
    while seen != 1:
        seen = tl.atomic_cas(mine, up, down, sem="acquire", scope="sys")
