# SPDX-License-Identifier: Apache-2.0
"""Compute what is before and behind a layer's attention by one operation each, where megarl's kernels can.

That is on CUDA in 16 bits, on one rank, with adapters of every linear and without dropout of their inputs.
"""

from typing import Any

import torch

from megarl.model.layers import pointwise
from megarl.model.layers.traced.kept import as_lists
from megarl.model.layers.updates import Operands, operands


def before(layer: Any, hidden: torch.Tensor, angles: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    """Return queries, keys and values of a layer's input ``[T, 1, H]``; None if no operation computes them."""
    attention, norm = layer.self_attention, layer.input_layernorm
    if not (_takes(hidden, norm) and attention.has_wide_heads(hidden)):
        return None
    given = _operands(attention.linear_qkv)
    if given is None:
        return None
    (linear,), heads = given, attention.heads
    eps, norms = [norm.eps, attention.config.layernorm_epsilon], [norm.weight, *attention.norms()]
    matrices, starts, scales = as_lists(linear)
    query, key, value, *_ = torch.ops.megarl.before_attention(
        hidden, angles, linear.weight, linear.matrix, matrices, linear.room, norms, starts, scales, eps,
        [heads.groups, heads.queries, heads.head_dim],
    )  # fmt: skip
    return query, key, value


def behind(layer: Any, residual: torch.Tensor, out: torch.Tensor) -> torch.Tensor | None:
    """Return a layer's output ``[T, 1, H]``, of the residual stream and of what attention has returned.

    Returns None if no operation computes it.
    """
    attention, mlp, norm = layer.self_attention, layer.mlp, layer.pre_mlp_layernorm
    if not _takes(out, norm) or getattr(mlp, "biased", True):
        return None
    linears = _operands(attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2)
    if linears is None:
        return None
    weights, matrices_a = [linear.weight for linear in linears], [linear.matrix for linear in linears]
    matrices, starts, scales = as_lists(*linears)
    output, *_ = torch.ops.megarl.behind_attention(
        out, residual, norm.weight, weights, matrices_a, matrices, linears[0].room, linears[1].room, starts, scales,
        norm.eps,
    )  # fmt: skip
    return output


def _takes(states: torch.Tensor, norm: Any) -> bool:
    return pointwise.has_kernels(states) and hasattr(norm, "beside_sum") and not norm.weight.requires_grad


def _operands(*linears: Any) -> list[Operands] | None:
    from megarl.model.layers.kernels import through_gradients  # here, since Triton may not be installed

    found = [operands(linear) for linear in linears]
    fits = [one for one in found if one is not None and through_gradients.takes(one.matrix)]
    return fits if len(fits) == len(found) else None
