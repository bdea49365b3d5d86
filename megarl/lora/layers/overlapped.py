# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel linears with adapters, whose collectives run beside the products of other tokens.

Under sequence parallelism a column-parallel linear gathers its tokens and a row-parallel one sums and scatters its
outputs; the backward pass does the reverse. Here the tokens are divided: while the products of one part are computed,
the next part arrives, or the one before leaves. The adapter's part is added before the sum, so that it needs no wide
collective of its own, and its rank-r activations travel beside the wide products.

Shapes: W tensor-parallel ranks, S tokens of a rank (T = W S), C tokens of a part, I inputs and O outputs on this rank,
R sum of the parts' ranks.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from megarl import progress
from megarl.lora.layers.products import Layout, assemble, b_gradients, factor, product

# The least bytes that a rank sends in a part, and the most parts: short collectives, and short products, cost more.
LEAST_BYTES, MOST_PARTS = 4 * 2**20, 4


def can_overlap(base: torch.nn.Module) -> bool:
    """Return True if a linear's collectives can be taken apart: mcore's, frozen, under sequence parallelism.

    Hooks of the linear would not be called, so one that has any is called whole.
    """
    if not isinstance(base, (ColumnParallelLinear, RowParallelLinear)) or base._forward_hooks:
        return False
    alone = base.is_expert or getattr(base, "gather_output", False) or not getattr(base, "input_is_parallel", True)
    return bool(base.sequence_parallel) and not alone and not base.weight.requires_grad


def column_linear(
    hidden: torch.Tensor, weight: torch.Tensor, matrix_a: torch.Tensor, matrices: Sequence[torch.Tensor],
    layout: Layout, group: dist.ProcessGroup,
) -> torch.Tensor:  # fmt: skip
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
    return _Column.apply(hidden, weight, matrix_a, layout, group, *matrices)


def row_linear(
    hidden: torch.Tensor, weight: torch.Tensor, matrix_a: torch.Tensor, matrices: Sequence[torch.Tensor],
    layout: Layout, group: dist.ProcessGroup,
) -> torch.Tensor:  # fmt: skip
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
    return _Row.apply(hidden, weight, matrix_a, layout, group, *matrices)


def parts_of(tokens: int, nbytes: int) -> list[slice]:
    """Divide a rank's tokens into parts that travel one after the other, of sizes that differ by one at most.

    Args:
        tokens: S.
        nbytes: bytes of them.
    """
    count = max(1, min(MOST_PARTS, nbytes // LEAST_BYTES, tokens))
    ends = [tokens * number // count for number in range(count + 1)]
    return [slice(first, last) for first, last in itertools.pairwise(ends)]


class _Gathered:
    """Tokens of all ranks that arrive part by part, ``[W, C, F]`` each. The first ones are on their way at once."""

    def __init__(self, local: torch.Tensor, parts: list[slice], group: dist.ProcessGroup) -> None:
        self._local, self._waiting, self._group = local.contiguous(), list(parts), group
        self._coming: list[tuple[slice, torch.Tensor, Any]] = []
        self.begin(1)

    def begin(self, count: int | None = None) -> None:
        """Send the next ``count`` parts; all that are left by default."""
        for part in self._waiting[:count]:
            rows = self._local[part]
            whole = rows.new_empty(self._group.size(), *rows.shape)
            work = dist.all_gather_into_tensor(whole.flatten(0, 1), rows, group=self._group, async_op=True)
            self._coming.append((part, whole, work))
        self._waiting = self._waiting[count:] if count is not None else []

    def __iter__(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield each part with its place among a rank's tokens, as soon as kernels may read it."""
        while self._coming:
            part, whole, work = self._coming.pop(0)
            work.wait()
            yield part, whole


class _Scattered:
    """Sums over the ranks that leave part by part; each rank keeps those of its own tokens."""

    def __init__(self, like: torch.Tensor, tokens: int, features: int, group: dist.ProcessGroup) -> None:
        self._sums, self._group = like.new_empty(tokens, features), group
        self._leaving: list[tuple[torch.Tensor, Any]] = []

    def put(self, part: slice, values: torch.Tensor) -> None:
        """Send a part, ``[W, C, F]``, contiguous."""
        whole = values.flatten(0, 1)
        work = dist.reduce_scatter_tensor(self._sums[part], whole, group=self._group, async_op=True)
        self._leaving.append((whole, work))

    def wait(self) -> torch.Tensor:
        """Return the sums of this rank's tokens, ``[S, F]``, once kernels may read them."""
        for _, work in self._leaving:
            work.wait()
        self._leaving = []
        return self._sums


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, matrix_a: torch.Tensor, layout: Layout,
        group: dist.ProcessGroup, *matrices: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Compute the linear and the adapter of each part of the tokens while the next one arrives."""
        progress.made()
        local, ranks = hidden.reshape(-1, hidden.shape[-1]), group.size()
        parts = parts_of(len(local), local.nbytes)
        tokens = _Gathered(local, parts, group)
        every = [slice(0, len(local))]
        low_tokens = _Gathered(local @ matrix_a.t(), every, group)
        tokens.begin()
        wide = assemble(matrices, len(weight), layout)
        ((_, low),) = low_tokens
        out = hidden.new_empty(ranks, len(local), len(weight))
        for part, rows in tokens:
            torch.bmm(rows, weight.t().expand(ranks, -1, -1), out=out[:, part])
            _add(out[:, part], low[:, part], wide.t(), factor(layout))
        ctx.save_for_backward(local, weight, matrix_a, wide, low)
        ctx.layout, ctx.group, ctx.parts, ctx.shape = layout, group, parts, hidden.shape
        return out.view(-1, *hidden.shape[1:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        progress.made()
        local, weight, matrix_a, wide, low = ctx.saved_tensors
        slope = gradients[0].reshape(-1, len(weight))
        rows = slope.view(ctx.group.size(), len(local), -1)
        by_low = product(slope, wide, factor(ctx.layout)).view(*rows.shape[:2], -1)
        low_sums = _Scattered(by_low, len(local), by_low.shape[-1], ctx.group)
        low_sums.put(slice(None), by_low)
        sums = _Scattered(local, len(local), local.shape[1], ctx.group)
        for part in ctx.parts if ctx.needs_input_grad[0] else ():
            sums.put(part, _sum(rows[:, part], weight, by_low[:, part], matrix_a, 1.0))
        by_matrices = b_gradients(slope, low.flatten(0, 1), ctx.layout)
        by_a = low_sums.wait().t() @ local
        by_hidden = sums.wait().view(ctx.shape) if ctx.needs_input_grad[0] else None
        return by_hidden, None, by_a, None, None, *by_matrices


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, matrix_a: torch.Tensor, layout: Layout,
        group: dist.ProcessGroup, *matrices: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Compute the linear and the adapter of each part of the tokens while the one before is summed."""
        progress.made()
        flat, ranks = hidden.reshape(-1, hidden.shape[-1]), group.size()
        rows = flat.view(ranks, -1, flat.shape[-1])
        tokens, wide = rows.shape[1], assemble(matrices, len(weight), layout)
        parts = parts_of(tokens, tokens * len(weight) * weight.itemsize)
        low = (flat @ matrix_a.t()).view(ranks, tokens, -1)
        low_sums = _Scattered(low, tokens, low.shape[-1], group)
        low_sums.put(slice(None), low)
        sums = _Scattered(flat, tokens, len(weight), group)
        for part in parts:
            sums.put(part, _sum(rows[:, part], weight.t(), low[:, part], wide.t(), factor(layout)))
        ctx.save_for_backward(rows, weight, matrix_a, wide, low_sums.wait())
        ctx.layout, ctx.group, ctx.parts, ctx.shape = layout, group, parts, hidden.shape
        return sums.wait().view(-1, *hidden.shape[1:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        progress.made()
        rows, weight, matrix_a, wide, low = ctx.saved_tensors
        slope, ranks = gradients[0].reshape(-1, len(weight)), ctx.group.size()
        needed = ctx.parts if ctx.needs_input_grad[0] else []
        slopes = _Gathered(slope, needed, ctx.group)
        low_slopes = _Gathered(product(slope, wide, factor(ctx.layout)), [slice(0, len(slope))], ctx.group)
        slopes.begin()
        by_matrices = b_gradients(slope, low, ctx.layout)
        ((_, by_low),) = low_slopes
        by_a = by_low.flatten(0, 1).t() @ rows.flatten(0, 1)
        by_hidden = torch.empty_like(rows)
        for part, arrived in slopes:
            torch.bmm(arrived, weight.expand(ranks, -1, -1), out=by_hidden[:, part])
            _add(by_hidden[:, part], by_low[:, part], matrix_a, 1.0)
        return by_hidden.view(ctx.shape) if needed else None, None, by_a, None, None, *by_matrices


def _sum(
    rows: torch.Tensor, matrix: torch.Tensor, low: torch.Tensor, small: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return ``rows @ matrix + scale * low @ small``, ``[W, C, F]``, contiguous."""
    out = torch.bmm(rows, matrix.expand(len(rows), -1, -1))
    _add(out, low, small, scale)
    return out


def _add(out: torch.Tensor, low: torch.Tensor, small: torch.Tensor, scale: float) -> None:
    """Add ``scale * low @ small`` to ``out [W, C, F]``, in its memory."""
    out.baddbmm_(low, small.expand(len(out), -1, -1), alpha=scale)
