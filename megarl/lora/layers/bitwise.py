# SPDX-License-Identifier: Apache-2.0
"""A linear and its adapter as one custom operation, for ``model.numerics: bitwise``.

The forward pass rounds where the sampler's does: the base's output, the product with A, B times its scaling, and the
sum. The backward pass is that of ``products``. Shapes: T tokens, I inputs and O outputs of the fused layer, R sum of
the parts' ranks.
"""

import functools
from typing import Any

import torch
from torch.library import custom_op

from megarl.bitwise.blas import multiply
from megarl.bitwise.kernels.low_rank import Columns, Tokens, all_tokens, expand, shrink
from megarl.lora.layers import products
from megarl.lora.layers.products import Layout
from megarl.model.weights.fusion import HeadLayout


def adapted_linear(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, a: torch.Tensor, b: list[torch.Tensor],
    layout: Layout,
) -> torch.Tensor:  # fmt: skip
    """Return the base's output plus the adapter's.

    Args:
        inputs: ``[T, I]``.
        weight, bias: the base's ``[O, I]`` and ``[O]``, frozen.
        a: every part's A, ``[R, I]``.
        b: B of each adapted part, ``[rows, r]``.
        layout: positions of the parts.

    Returns:
        ``[T, O]``.
    """
    heads = layout.heads
    numbers = [*layout.places, *layout.ranks, *layout.starts, heads.groups, heads.queries, heads.head_dim]
    return _adapted_linear(inputs, weight, bias, a, b, list(layout.scalings), numbers, layout.fusion)[0]


@custom_op("megarl::bitwise_adapted_linear", mutates_args=())
def _adapted_linear(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, a: torch.Tensor, b: list[torch.Tensor],
    scalings: list[float], numbers: list[int], fusion: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return ``[T, O]``, and the product with A, ``[T, R]``."""
    layout = _layout(scalings, numbers, fusion)
    tokens = _tokens(len(inputs), inputs.device)
    out = multiply(inputs, weight, bias)
    low = inputs.new_empty(len(inputs), len(a))
    done = set()
    for place, rank, start, scaling, matrix in zip(
        layout.places, layout.ranks, layout.starts, layout.scalings, b, strict=True
    ):
        part = low[:, start : start + rank]
        if start not in done:
            shrink(inputs, a[None, start : start + rank], tokens, part)
            done.add(start)
        # In float32, rounded once, as the sampler's slots are filled.
        scaled = matrix if scaling == 1.0 else matrix * scaling
        expand(part, scaled[None], tokens, out, out, _columns(layout, place, len(matrix)))
    return out, low


@_adapted_linear.register_fake
def _(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, a: torch.Tensor, b: list[torch.Tensor],
    scalings: list[float], numbers: list[int], fusion: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return inputs.new_empty(inputs.shape[0], weight.shape[0]), inputs.new_empty(inputs.shape[0], a.shape[0])


def _layout(scalings: list[float], numbers: list[int], fusion: Any) -> Layout:
    count = len(scalings)
    places, ranks, starts = (tuple(numbers[i * count : (i + 1) * count]) for i in range(3))
    return Layout(places, ranks, tuple(scalings), fusion, HeadLayout(*numbers[3 * count :]), starts)


def _columns(layout: Layout, place: int, rows: int) -> Columns:
    """Return the columns of a part with ``rows`` features among the fused layer's."""
    if layout.fusion != "qkv":
        return Columns.of(rows, place * rows)
    queries, width = layout.heads.queries, layout.heads.head_dim
    run = queries * width if place == 0 else width
    return Columns(run, (queries + 2) * width, 0 if place == 0 else (queries + place - 1) * width)


def _tokens(count: int, device: torch.device) -> Tokens:
    # A graph would go on reading what the cache has dropped.
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return all_tokens(count, device) if capturing else _kept_tokens(count, device)


_kept_tokens = functools.lru_cache(maxsize=16)(all_tokens)


def _keep(ctx: Any, inputs: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
    hidden, weight, _, a, b, ctx.scalings, ctx.numbers, ctx.fusion = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(hidden, weight, a, output[1], *b)


def _gradient(ctx: Any, gradient: torch.Tensor, _: Any) -> Any:
    hidden, weight, a, low, *b = ctx.saved_tensors
    layout = _layout(ctx.scalings, ctx.numbers, ctx.fusion)
    wide = products.assemble(tuple(b), gradient.shape[1], layout)
    by_low = products.product(gradient, wide, products.factor(layout))
    by_hidden = (gradient @ weight).addmm_(by_low, a)
    by_a = by_low.t() @ hidden
    by_b = products.b_gradients(gradient, low, layout)
    return by_hidden, None, None, by_a, by_b, None, None, None


_adapted_linear.register_autograd(_gradient, setup_context=_keep)
