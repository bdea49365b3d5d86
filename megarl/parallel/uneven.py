# SPDX-License-Identifier: Apache-2.0
"""Gather and reduce-scatter unequal parts, which gloo cannot. mcore's expert dispatch needs them on a CPU host."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def gather_uneven(part: torch.Tensor, group: dist.ProcessGroup, sizes: list[int]) -> torch.Tensor:
    """Concatenate parts of ``sizes[rank]`` rows over a group. Parts are sent padded to the longest."""
    longest = max(sizes)
    padded = torch.cat([part, part.new_zeros(longest - part.shape[0], *part.shape[1:])])
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([received[:size] for received, size in zip(parts, sizes, strict=True)])


def reduce_scatter_uneven(whole: torch.Tensor, group: dist.ProcessGroup, sizes: list[int]) -> torch.Tensor:
    """Sum over a group and keep this rank's ``sizes[rank]`` rows."""
    summed = whole.clone()
    dist.all_reduce(summed, group=group)
    return summed.split(sizes)[group.rank()].clone()


def install(mappings: Any) -> None:
    """Make mcore's ``tensor_parallel.mappings`` use these functions for unequal parts. Idempotent."""
    for name, uneven in (
        ("_gather_along_first_dim", gather_uneven),
        ("_reduce_scatter_along_first_dim", reduce_scatter_uneven),
    ):
        original = getattr(mappings, name)
        if not hasattr(original, "even"):
            setattr(mappings, name, _either(original, uneven))


def _either(even: Callable, uneven: Callable) -> Callable:
    def choose(tensor: torch.Tensor, group: Any, sizes: list[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        keyword = next((key for key in kwargs if key.endswith("split_sizes")), None)
        sizes = kwargs.pop(keyword) if keyword else sizes
        if sizes is None or group.size() == 1:
            return even(tensor, group, None, *args, **kwargs)
        return uneven(tensor, group, sizes)

    choose.even = even  # type: ignore[attr-defined]
    return choose
