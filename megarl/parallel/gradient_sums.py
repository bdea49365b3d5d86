# SPDX-License-Identifier: Apache-2.0
"""Add gradients to mcore's float32 buffers: small ones together, in few kernels.

An adapter has hundreds of matrices. A kernel for each takes the host, and the GPU, longer to start than to run.
"""

from collections.abc import Sequence

import torch

# A gradient of more elements is added by itself.
SMALL = 2**20


def add_gradients(parameters: Sequence[torch.nn.Parameter], gradients: Sequence[torch.Tensor | None]) -> None:
    """Add gradients to their parameters' ``main_grad``; None is no gradient."""
    sums, small = [], []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        if gradient.numel() > SMALL:
            parameter.main_grad.add_(gradient)
            continue
        sums.append(parameter.main_grad)
        small.append(gradient.contiguous())
    if small:
        widened = [torch.empty_like(total) for total in sums]
        torch._foreach_copy_(widened, small)
        torch._foreach_add_(sums, widened)
