# SPDX-License-Identifier: Apache-2.0
"""Bring arguments into the one form that the kernels are compiled for."""

from typing import Any

import torch

ALIGNMENT = 16  # bytes of an address, and elements of a stride, that Triton recognises
# Passed with every launch: the compiler must not choose where to fuse a multiplication and an addition.
UNFUSED: dict[str, Any] = {"enable_fp_fusion": False}


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a contiguous copy of it unless address and strides have the one form.

    The last dimension must be contiguous; the address must be a multiple of 16 bytes, every other stride a multiple of
    16 elements.

    Args:
        tensor: two dimensions or more.

    Raises:
        ValueError: the size of the last dimension is not a multiple of 16, so that a copy would not help.
    """
    *outer, inner = tensor.stride()
    if inner == 1 and not any(stride % ALIGNMENT for stride in outer) and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    if tensor.shape[-1] % ALIGNMENT:
        raise ValueError(
            f"the last dimension has {tensor.shape[-1]} elements; numerics=bitwise needs a multiple of {ALIGNMENT}"
        )
    return tensor.clone(memory_format=torch.contiguous_format)
