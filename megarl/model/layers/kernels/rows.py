# SPDX-License-Identifier: Apache-2.0
"""View tensors as rows, which are contiguous and need not be adjacent; choose how one program computes a row."""

from functools import cache

import torch

from megarl.triton_support import power_of_two


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``[..., W]`` as ``[T, W]`` with contiguous rows; a view where the strides allow it."""
    rows = tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


@cache
def row_settings(width: int, features_of_a_warp: int) -> dict[str, int]:
    """Return a kernel's ``WIDTH``, ``BLOCK`` and ``num_warps``, for a program that computes a whole row."""
    block = power_of_two(width)
    return {"WIDTH": width, "BLOCK": block, "num_warps": min(16, max(1, block // features_of_a_warp))}
