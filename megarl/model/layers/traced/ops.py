# SPDX-License-Identifier: Apache-2.0
"""Kernels of layers as custom operations, which torch.compile does not look into.

The compiler's own kernels for these parts take twice as long, because it reads an activation anew for each half of a
rotation or of a gated product. Shape letters: T tokens, I features of the gate, G KV heads, N query heads of each, D
head_dim. Import this module only where Triton is installed.
"""

from typing import Any

import torch

from megarl.model.layers.kernels import heads as head_kernels
from megarl.model.layers.kernels import swiglu as swiglu_kernels
from megarl.model.layers.traced.operators import operator
from megarl.model.weights.fusion import HeadLayout

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@operator("swiglu")
def swiglu(fused: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``, ``[..., 2 I] -> [..., I]``; see ``swiglu.swiglu``."""
    return swiglu_kernels.result_of(fused)


@operator("swiglu_backward")
def swiglu_backward(gradient: torch.Tensor, fused: torch.Tensor) -> torch.Tensor:
    """Return the gradient of ``fused``."""
    return swiglu_kernels.gradient_of(gradient, fused)


@operator("prepare_heads")
def prepare_heads(
    fused: torch.Tensor, angles: torch.Tensor, weights: list[torch.Tensor], eps: float, layout: list[int]
) -> Tensors:
    """Split a fused projection, normalise queries and keys, and rotate them; see ``heads.prepare_heads``.

    Args:
        fused: ``[T, ..., G * (N + 2) * D]``.
        angles: ``[T, ..., D]`` float32, radians; the second half repeats the first.
        weights: frozen weights of the norms of queries and keys, ``[D]`` each; empty without norms.
        eps: epsilon of the norms.
        layout: G, N and D.

    Returns:
        Queries ``[T, ..., G * N, D]``, keys and values ``[T, ..., G, D]``.
    """
    return head_kernels.result_of(fused, angles, tuple(weights), eps, HeadLayout(*layout))


@operator("prepare_heads_backward")
def prepare_heads_backward(
    by_query: torch.Tensor, by_key: torch.Tensor, by_value: torch.Tensor, fused: torch.Tensor, angles: torch.Tensor,
    weights: list[torch.Tensor], eps: float, layout: list[int],
) -> torch.Tensor:  # fmt: skip
    """Return the gradient of ``fused``, rounded once."""
    given = (by_query, by_key, by_value)
    return head_kernels.gradient_of(given, fused, angles, tuple(weights), eps, HeadLayout(*layout))


@swiglu.register_fake
def empty_swiglu(fused: torch.Tensor) -> torch.Tensor:
    """Return an empty result."""
    return swiglu_kernels.empty_result(fused)


@swiglu_backward.register_fake
def _(gradient: torch.Tensor, fused: torch.Tensor) -> torch.Tensor:
    return fused.new_empty(fused.shape)


@prepare_heads.register_fake
def empty_heads(
    fused: torch.Tensor, angles: torch.Tensor, weights: list[torch.Tensor], eps: float, layout: list[int]
) -> Tensors:
    """Return empty queries, keys and values."""
    return head_kernels.empty_parts(fused, HeadLayout(*layout))


@prepare_heads_backward.register_fake
def _(by_query: Any, by_key: Any, by_value: Any, fused: torch.Tensor, *others: Any) -> torch.Tensor:
    return fused.new_empty(fused.shape)


def keep_swiglu(ctx: Any, inputs: Any, output: Any) -> None:
    """Keep what ``swiglu_gradient`` needs."""
    ctx.save_for_backward(*inputs)


def swiglu_gradient(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    """Differentiate any forward pass with the inputs of ``swiglu``."""
    return swiglu_backward(gradient, *ctx.saved_tensors)


def keep_heads(ctx: Any, inputs: Any, output: Any) -> None:
    """Keep what ``heads_gradient`` needs."""
    fused, angles, weights, ctx.eps, ctx.layout = inputs
    ctx.save_for_backward(fused, angles, *weights)


def heads_gradient(ctx: Any, *gradients: torch.Tensor) -> Any:
    """Differentiate any forward pass with the inputs of ``prepare_heads``."""
    fused, angles, *weights = ctx.saved_tensors
    by_fused = prepare_heads_backward(*gradients, fused, angles, weights, ctx.eps, ctx.layout)
    return by_fused, None, [None] * len(weights), None, None


swiglu.register_autograd(swiglu_gradient, setup_context=keep_swiglu)
prepare_heads.register_autograd(heads_gradient, setup_context=keep_heads)
