# SPDX-License-Identifier: Apache-2.0
"""View tensors as rows. Each row is contiguous; the rows need not be adjacent."""

import torch


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``[..., W]`` as ``[T, W]`` with contiguous rows; a view where the strides allow it."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
