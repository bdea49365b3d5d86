# SPDX-License-Identifier: Apache-2.0
"""Gather tokens of all tensor-parallel ranks for a product, and sum products over them, beside the product itself.

On GPUs of one host the ranks read each other's memory (``peers``). Elsewhere one collective comes before or after the
product.

Shapes: W ranks, S tokens of a rank, T = W S tokens in the order of the ranks, F features.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Protocol

import torch
import torch.distributed as dist

# Consumes some tokens: their places among all, and both tensors' rows of them.
Use = Callable[[slice, torch.Tensor, torch.Tensor], None]
# Produces the rows of some tokens: their places among all, and where the rows go.
Fill = Callable[[slice, torch.Tensor], None]
# Operations of a product with one rank's tokens that take a GPU longer than the host needs to launch them and a copy.
LEAST_WORK = 4 * 10**10
_captured = False


class Exchange(Protocol):
    """Exchanges tokens between the ranks of a group. Every method is collective over them."""

    def gather(self, wide: torch.Tensor, narrow: torch.Tensor, use: Use) -> torch.Tensor:
        """Give all ranks' tokens to ``use``, rank by rank or all at once; return ``narrow`` of all, ``[T, F]``.

        Args:
            wide, narrow: two tensors of this rank's tokens, ``[S, F]`` each.
            use: launches kernels on the current stream only, and allocates nothing.
        """
        ...

    def scatter(self, fill: Fill, like: torch.Tensor, tokens: int, features: int) -> torch.Tensor:
        """Return the sum over the ranks of what ``fill`` produces, for this rank's tokens: ``[S, F]``.

        Args:
            fill: as ``use`` of ``gather``.
            like: a tensor of the result's dtype, on its device.
            tokens: S.
            features: F.
        """
        ...


class Whole:
    """One collective for all tokens, by NCCL or gloo."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def gather(self, wide: torch.Tensor, narrow: torch.Tensor, use: Use) -> torch.Tensor:
        """See ``Exchange``."""
        every, low = self._gathered(wide), self._gathered(narrow)
        use(slice(0, len(every)), every, low)
        return low

    def scatter(self, fill: Fill, like: torch.Tensor, tokens: int, features: int) -> torch.Tensor:
        """See ``Exchange``."""
        every = like.new_empty(self._group.size() * tokens, features)
        fill(slice(0, len(every)), every)
        mine = like.new_empty(tokens, features)
        dist.reduce_scatter_tensor(mine, every, group=self._group)
        return mine

    def _gathered(self, local: torch.Tensor) -> torch.Tensor:
        every = local.new_empty(self._group.size() * len(local), local.shape[1])
        dist.all_gather_into_tensor(every, local.contiguous(), group=self._group)
        return every


def exchange_of(group: dist.ProcessGroup, like: torch.Tensor, work: int) -> Exchange:
    """Return the exchange for a product. Collective over the group when it is first asked for GPUs.

    Args:
        group: tensor-parallel ranks.
        like: a tensor on the product's device.
        work: operations of the product for one rank's tokens.
    """
    if not like.is_cuda:
        return Whole(group)
    exchange = _exchange(group)
    return exchange if _captured or work >= LEAST_WORK else Whole(group)


@contextmanager
def captured() -> Iterator[None]:
    """Say that kernels are being captured in a CUDA graph, or are about to be: their launches then cost nothing."""
    global _captured
    before, _captured = _captured, True
    try:
        yield
    finally:
        _captured = before


def forget_exchanges() -> None:
    """Release what exchanges hold, before the groups end."""
    if _exchange.cache_info().currsize:
        torch.cuda.synchronize()  # this rank reads the others' memory no more; theirs stays until they have done so too
    _exchange.cache_clear()


@cache
def _exchange(group: dist.ProcessGroup) -> Exchange:
    from megarl.parallel.peers import Peers, can_read

    return Peers(group) if can_read(group) else Whole(group)
