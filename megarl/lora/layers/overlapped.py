# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel linears with adapters, whose tokens travel beside the products (``parallel.token_exchange``).

Under sequence parallelism a column-parallel linear gathers its tokens, and a row-parallel one sums and scatters its
outputs; the backward pass does the reverse. The adapter's part is added before a sum, so it costs no wide collective,
and its rank-r activations travel with the tokens.

Shapes: W tensor-parallel ranks, S tokens of a rank, T = W S, I inputs and O outputs on this rank, R sum of the parts'
ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from megarl import progress
from megarl.lora.layers.beside import unhooked
from megarl.lora.layers.products import Layout, assemble, b_gradients, factor
from megarl.model.layers.updates import product
from megarl.parallel.token_exchange import exchange_of


def can_overlap(base: torch.nn.Module) -> bool:
    """Return True if a linear's collectives can be taken apart: mcore's, frozen, under sequence parallelism.

    Hooks of the linear would not be called, so one that has any is called whole.
    """
    if not isinstance(base, (ColumnParallelLinear, RowParallelLinear)):
        return False
    if not unhooked(base):
        return False
    alone = base.is_expert or getattr(base, "gather_output", False) or not getattr(base, "input_is_parallel", True)
    return bool(base.sequence_parallel) and not alone and not base.weight.requires_grad


def column_linear(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    matrix_a: torch.Tensor,
    matrices: Sequence[torch.Tensor],
    layout: Layout,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Gather all ranks' tokens and return ``x @ weight.T`` plus the adapter's part. Collective over ``group``.

    Args:
        hidden: this rank's tokens, ``[S, 1, I]``.
        weight: the base's, ``[O, I]``; gets no gradient.
        matrix_a: every part's A, ``[R, I]``. Its gradient is of this rank's tokens alone.
        matrices: this rank's rows of every part's B.
        layout: positions of the parts.
        group: the tensor-parallel ranks.

    Returns:
        ``[T, 1, O]``.
    """
    return _Column.apply(layout, group, hidden, weight, matrix_a, *matrices)


def row_linear(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    matrix_a: torch.Tensor,
    matrices: Sequence[torch.Tensor],
    layout: Layout,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Return the sum over the ranks of ``x @ weight.T`` plus the adapter's part, for this rank's tokens. Collective.

    Args:
        hidden: this rank's features of all tokens, ``[T, 1, I]``.
        weight: the base's, ``[O, I]``; gets no gradient.
        matrix_a: this rank's columns of every part's A, ``[R, I]``.
        matrices: every part's whole B. Their gradients are of this rank's tokens alone.
        layout: positions of the parts.
        group: the tensor-parallel ranks.

    Returns:
        ``[S, 1, O]``.
    """
    return _Row.apply(layout, group, hidden, weight, matrix_a, *matrices)


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: Layout, group: dist.ProcessGroup, *given: torch.Tensor) -> torch.Tensor:
        """Compute the linear and the adapter of one rank's tokens while another's arrive."""
        progress.made()
        hidden, weight, matrix_a, *matrices = given
        local, wide = _rows(hidden), assemble(tuple(matrices), len(weight), layout)
        out = hidden.new_empty(group.size() * len(local), len(weight))
        product_of = _Sum(weight.t(), wide.t(), factor(layout))

        def use(places: slice, tokens: torch.Tensor, low: torch.Tensor) -> None:
            product_of(tokens, low, out[places])

        exchange = exchange_of(group, local, 2 * len(local) * weight.numel())
        low = exchange.gather(local, local @ matrix_a.t(), use)
        ctx.save_for_backward(local, weight, matrix_a, wide, low)
        ctx.layout, ctx.group, ctx.shape = layout, group, hidden.shape
        return out.view(-1, *hidden.shape[1:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradients of ``hidden [T/TP, ..., I]``, A ``[R, I]`` and B; given that of ``[T, ..., O/TP]``."""
        progress.made()
        local, weight, matrix_a, wide, low = ctx.saved_tensors
        slope = _rows(gradients[0])
        by_low = product(slope, wide, factor(ctx.layout))
        low_sums = by_low.new_empty(len(local), by_low.shape[1])
        work = dist.reduce_scatter_tensor(low_sums, by_low, group=ctx.group, async_op=True)
        by_hidden = None
        if ctx.needs_input_grad[2]:
            by_hidden = _summed(slope, by_low, _Sum(weight, matrix_a, 1.0), ctx.group).view(ctx.shape)
        by_matrices = b_gradients(slope, low, ctx.layout)
        work.wait()
        return None, None, by_hidden, None, low_sums.t() @ local, *by_matrices


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: Layout, group: dist.ProcessGroup, *given: torch.Tensor) -> torch.Tensor:
        """Compute the linear and the adapter of one rank's tokens while another's sums leave."""
        progress.made()
        hidden, weight, matrix_a, *matrices = given
        rows, wide = _rows(hidden), assemble(tuple(matrices), len(weight), layout)
        low = rows @ matrix_a.t()
        low_sums = low.new_empty(len(low) // group.size(), low.shape[1])
        work = dist.reduce_scatter_tensor(low_sums, low, group=group, async_op=True)
        out = _summed(rows, low, _Sum(weight.t(), wide.t(), factor(layout)), group)
        work.wait()
        ctx.save_for_backward(rows, weight, matrix_a, wide, low_sums)
        ctx.layout, ctx.group, ctx.shape = layout, group, hidden.shape
        return out.view(-1, *hidden.shape[1:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradients of ``hidden [T, ..., I/TP]``, A and B ``[O, r]``; given that of ``[T/TP, ..., O]``."""
        progress.made()
        rows, weight, matrix_a, wide, low = ctx.saved_tensors
        slope, by_hidden = _rows(gradients[0]), torch.empty_like(rows)
        product_of, needed = _Sum(weight, matrix_a, 1.0), ctx.needs_input_grad[2]

        def use(places: slice, slopes: torch.Tensor, by_low: torch.Tensor) -> None:
            if needed:
                product_of(slopes, by_low, by_hidden[places])

        exchange = exchange_of(ctx.group, slope, 2 * len(slope) * weight.numel())
        by_low = exchange.gather(slope, product(slope, wide, factor(ctx.layout)), use)
        by_matrices = b_gradients(slope, low, ctx.layout)
        by_given = by_hidden.view(ctx.shape) if needed else None
        return None, None, by_given, None, by_low.t() @ rows, *by_matrices


class _Sum:
    """Computes ``rows @ matrix + scale * low @ small`` into given memory."""

    def __init__(self, matrix: torch.Tensor, small: torch.Tensor, scale: float) -> None:
        self._matrix, self._small, self._scale = matrix, small, scale
        self.features = matrix.shape[1]

    def __call__(self, rows: torch.Tensor, low: torch.Tensor, out: torch.Tensor) -> None:
        torch.mm(rows, self._matrix, out=out)
        out.addmm_(low, self._small, alpha=self._scale)


def _summed(rows: torch.Tensor, low: torch.Tensor, product_of: _Sum, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum over the ranks of ``product_of(rows, low)``, for this rank's tokens: ``[S, F]``."""

    def fill(places: slice, out: torch.Tensor) -> None:
        product_of(rows[places], low[places], out)

    tokens, features = len(rows) // group.size(), product_of.features
    return exchange_of(group, rows, 2 * tokens * rows.shape[1] * features).scatter(fill, rows, tokens, features)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])
