# SPDX-License-Identifier: Apache-2.0
"""Compute what is before and behind a layer's attention by one operation each, where megarl's kernels can.

That is on CUDA in 16 bits, on one rank, with adapters of every linear and without dropout of their inputs. A layer that
has nothing but these operations and attention leaves nothing to torch.compile. It is called without it (``directly``),
since what torch.compile does around a layer takes the host time.
"""

from typing import Any

import torch

from megarl.model.layers import pointwise
from megarl.model.layers.traced.kept import as_lists
from megarl.model.layers.updates import Operands, operands
from megarl.parallel.stacks import rows_in


def before(layer: Any, hidden: torch.Tensor, angles: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    """Return queries, keys and values of a layer's input ``[T, 1, H]``, in a trace; None if no operation does."""
    given = _before(layer, hidden)
    if given is None:
        return None
    query, key, value, *_ = torch.ops.megarl.before_attention(hidden, angles, *given)
    return query, key, value


def behind(layer: Any, residual: torch.Tensor, out: torch.Tensor) -> torch.Tensor | None:
    """Return a layer's output ``[T, 1, H]`` of the residual stream and of what attention has returned, in a trace.

    Returns None if no operation does.
    """
    given = _behind(layer, residual)
    if given is None:
        return None
    output, *_ = torch.ops.megarl.behind_attention(out, residual, *given)
    return output


def directly(layer: Any, hidden: torch.Tensor, angles: torch.Tensor, packed: Any) -> torch.Tensor | None:
    """Return a layer's output ``[T, 1, H]`` by the same operations, outside traces; None if they do not compute it.

    Args:
        layer: a ``PackedLayer``.
        hidden, angles: as ``PackedLayer.forward`` takes them.
        packed: the sequences, as attention takes them outside traces.
    """
    first, second = _before(layer, hidden), _behind(layer, hidden)
    if first is None or second is None:
        return None
    from megarl.model.layers.traced.before import before_attention  # here, since Triton may not be installed
    from megarl.model.layers.traced.behind import behind_attention

    query, key, value, *_, residual = before_attention.direct(hidden, angles, *first)
    out = layer.self_attention.attend((query, key, value), packed)
    output, *_ = behind_attention.direct(out, residual, *second)
    return output


def _before(layer: Any, hidden: torch.Tensor) -> tuple[Any, ...] | None:
    """Return what ``before_attention`` takes behind the hidden states and angles; None if it cannot compute it."""
    attention, norm = layer.self_attention, layer.input_layernorm
    if not (_takes(hidden, norm) and hasattr(attention, "attend") and attention.has_wide_heads(hidden)):
        return None
    given = _operands(attention.linear_qkv)
    if given is None:
        return None
    (linear,), heads = given, attention.heads
    eps, norms = [norm.eps, attention.config.layernorm_epsilon], [norm.weight, *attention.norms()]
    layout = [heads.groups, heads.queries, heads.head_dim]
    matrices, starts, scales = as_lists(linear)
    return linear.weight, list(linear.matrices_a), matrices, linear.room, norms, starts, scales, eps, layout


def _behind(layer: Any, residual: torch.Tensor) -> tuple[Any, ...] | None:
    """Return what ``behind_attention`` takes behind attention's output and the residual stream, or None likewise."""
    attention, mlp, norm = layer.self_attention, layer.mlp, layer.pre_mlp_layernorm
    if not _takes(residual, norm) or getattr(mlp, "biased", True):
        return None
    linears = _operands(attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2)
    if linears is None:
        return None
    weights, counts = [linear.weight for linear in linears], [len(linear.matrices_a) for linear in linears]
    matrices_a = [matrix for linear in linears for matrix in linear.matrices_a]
    matrices, starts, scales = as_lists(*linears)
    rooms = linears[0].room, linears[1].room
    return norm.weight, weights, matrices_a, matrices, *rooms, counts, starts, scales, norm.eps


def _takes(states: torch.Tensor, norm: Any) -> bool:
    return pointwise.has_kernels(states) and hasattr(norm, "beside_sum") and not norm.weight.requires_grad


def _operands(*linears: Any) -> list[Operands] | None:
    from megarl.model.layers.kernels import through_gradients  # here, since Triton may not be installed

    found = []
    for linear in linears:
        one = operands(linear)
        if one is None or not through_gradients.takes(rows_in(one.matrices_a)):
            return None
        found.append(one)
    return found
