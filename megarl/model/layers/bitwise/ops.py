# SPDX-License-Identifier: Apache-2.0
"""Custom operations of the bitwise layers, with the forward passes of ``megarl.bitwise``.

The forward pass of a token does not depend on the other tokens. The backward pass does: a weight's gradient is a sum
over the tokens of a pack, and nothing is compared with it. It has no atomic additions, so two runs give the same bits.
Each operation is opaque to torch.compile. Shape letters: T tokens, W width of a row, G KV heads, N query heads of each,
D head_dim, S sequences.
"""

from typing import Any

import torch
from torch.library import custom_op

from megarl.bitwise.kernels import rows
from megarl.bitwise.kernels.attention import attend as attend_pages
from megarl.bitwise.kernels.attention import packed_pages
from megarl.model.layers.bitwise import attention_gradient
from megarl.model.layers.kernels import norm as norm_kernels
from megarl.model.layers.traced import ops as kernel_ops
from megarl.model.layers.traced.ops import Tensors


@custom_op("megarl::bitwise_rms_norm", mutates_args=())
def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise rows ``[T, W]`` by a frozen weight ``[W]``; see ``rows.rms_norm``."""
    return rows.rms_norm(hidden, weight, eps)


@custom_op("megarl::bitwise_rms_norm_backward", mutates_args=())
def rms_norm_backward(gradient: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the gradient of ``hidden``."""
    return norm_kernels.gradient_of(gradient, hidden, weight, eps)


@custom_op("megarl::bitwise_prepare_heads", mutates_args=())
def prepare_heads(
    fused: torch.Tensor, angles: torch.Tensor, weights: list[torch.Tensor], eps: float, layout: list[int]
) -> Tensors:
    """Split a fused projection, normalise queries and keys, and rotate them, each rounded as a step of its own.

    Args:
        fused: ``[T, G * (N + 2) * D]``.
        angles: ``[T, D]`` float32 radians; the second half repeats the first.
        weights: frozen weights of the norms of queries and keys, ``[D]`` each; empty without norms.
        eps: epsilon of the norms.
        layout: G, N and D.

    Returns:
        Queries ``[T, G * N, D]``, keys and values ``[T, G, D]``.
    """
    groups, queries, width = layout
    period = (queries + 2) * width
    turned = []
    for part, (number, run, start) in enumerate(((groups * queries, queries, 0), (groups, 1, queries * width))):
        here = rows.Heads(number, width, run, period, start)
        states = fused
        if weights:
            states, here = rows.rms_norm(fused, weights[part], eps, here), rows.Heads.of(number, width)
        turned.append(rows.rotate(states, angles, here))
    value = fused.view(len(fused), groups, queries + 2, width)[:, :, queries + 1].clone()
    return turned[0], turned[1], value


@custom_op("megarl::bitwise_swiglu", mutates_args=())
def swiglu(fused: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``, ``[T, 2 I] -> [T, I]``; see ``rows.swiglu``."""
    return rows.swiglu(fused)


@custom_op("megarl::bitwise_attend", mutates_args=())
def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, longest: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention within packed sequences.

    Args:
        query: ``[T, G * N, D]``.
        key, value: ``[T, G, D]``.
        bounds: int32 ``[S + 1]``: first token of each sequence, then T.
        longest: upper bound of the sequences' lengths.
        scale: factor of the logits.

    Returns:
        ``[T, G * N, D]``, and the base-2 logsumexps, float32 ``[G * N, T]``.
    """
    return attend_pages(query, packed_pages(key, value, bounds, longest), bounds, scale)


@custom_op("megarl::bitwise_attend_backward", mutates_args=())
def attend_backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    sums: torch.Tensor, bounds: torch.Tensor, longest: int, scale: float,
) -> Tensors:  # fmt: skip
    """Return the gradients of query, key and value."""
    return attention_gradient.attend_backward(gradient, query, key, value, out, sums, bounds, longest, scale)


@rms_norm.register_fake
def _(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _like(hidden)


@rms_norm_backward.register_fake
def _(gradient: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _like(hidden)


@attend.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, longest: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return _like(query), query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)


@attend_backward.register_fake
def _(gradient: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any) -> Tensors:
    return _like(query), _like(key), _like(value)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty(tensor.shape)


def _keep_norm(ctx: Any, inputs: Any, output: Any) -> None:
    hidden, weight, ctx.eps = inputs
    ctx.save_for_backward(hidden, weight)


def _norm_gradient(ctx: Any, gradient: torch.Tensor) -> Any:
    return rms_norm_backward(gradient, *ctx.saved_tensors, ctx.eps), None, None


def _keep_attention(ctx: Any, inputs: Any, output: Any) -> None:
    query, key, value, bounds, ctx.longest, ctx.scale = inputs
    out, sums = output
    ctx.mark_non_differentiable(sums)
    ctx.save_for_backward(query, key, value, out, sums, bounds)


def _attention_gradient(ctx: Any, gradient: torch.Tensor, _: Any) -> Any:
    return *attend_backward(gradient, *ctx.saved_tensors, ctx.longest, ctx.scale), None, None, None


rms_norm.register_autograd(_norm_gradient, setup_context=_keep_norm)
prepare_heads.register_fake(kernel_ops.empty_heads)
prepare_heads.register_autograd(kernel_ops.heads_gradient, setup_context=kernel_ops.keep_heads)
swiglu.register_fake(kernel_ops.empty_swiglu)
swiglu.register_autograd(kernel_ops.swiglu_gradient, setup_context=kernel_ops.keep_swiglu)
attend.register_autograd(_attention_gradient, setup_context=_keep_attention)
