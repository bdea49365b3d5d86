# SPDX-License-Identifier: Apache-2.0
"""Tensors as rows that are contiguous but may lie apart."""

import torch


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """``[..., W]`` as ``[T, W]`` with contiguous rows; a view where the strides allow it."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
