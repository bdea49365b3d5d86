# SPDX-License-Identifier: Apache-2.0
"""The linear of a frozen base as a custom operation. Its backward pass is cuBLAS's, as the fast path's is."""

from typing import Any

import torch
from torch.library import custom_op

from megarl.bitwise.blas import multiply


@custom_op("megarl::bitwise_linear", mutates_args=())
def linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``inputs @ weight.T + bias``, ``[T, K] -> [T, N]``; weight and bias get no gradient."""
    return multiply(inputs, weight, bias)


@linear.register_fake
def _(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return inputs.new_empty(inputs.shape[0], weight.shape[0])


def _keep(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _gradient(ctx: Any, gradient: torch.Tensor) -> Any:
    (weight,) = ctx.saved_tensors
    return gradient @ weight, None, None


linear.register_autograd(_gradient, setup_context=_keep)
