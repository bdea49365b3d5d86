# SPDX-License-Identifier: Apache-2.0
"""Packed attention for code that torch.compile traces, the same for every packing.

A trace is only valid for the Python numbers that it has seen, so a pack reaches it as tensors: bounds of its sequences,
and empty tensors whose sizes are the longest sequences. The numbers of tokens and sequences are dynamic in the trace.

On CUDA in 16 bits the trace contains torch's own operator for variable-length attention. Elsewhere attention is an
operator of megarl's that the compiler does not look into, because it computes sequence by sequence.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo import maybe_mark_dynamic
from torch.distributed.distributed_c10d import _resolve_process_group

from megarl.model.layers.traced.operators import operator


@dataclass(frozen=True)
class TracedPack:
    """A pack of sequences without Python numbers; see ``PackedSequences`` for the runs.

    Attributes:
        query_bounds, key_bounds: cumulated lengths of the runs, int32 ``[runs + 1]``, on the device.
        host_bounds: both, int64 ``[2, runs + 1]``, on the host.
        query_room, key_room: empty tensors, ``[longest, 0]``, with the longest run of either.
        key_rows: rows of the keys in the pack gathered from all CP ranks, int64; None without CP.
    """

    query_bounds: torch.Tensor
    key_bounds: torch.Tensor
    host_bounds: torch.Tensor
    query_room: torch.Tensor
    key_room: torch.Tensor
    key_rows: torch.Tensor | None

    @property
    def longest_query(self) -> int:
        """The longest run of queries; symbolic in a trace."""
        return self.query_room.shape[0]

    @property
    def longest_key(self) -> int:
        """The longest run of keys; symbolic in a trace."""
        return self.key_room.shape[0]

    def mark(self) -> "TracedPack":
        """Tell torch.compile which sizes change from pack to pack."""
        for tensor in (self.query_bounds, self.key_bounds, self.query_room, self.key_room, self.key_rows):
            if tensor is not None:
                maybe_mark_dynamic(tensor, 0)
        maybe_mark_dynamic(self.host_bounds, 1)
        return self


@operator("attend")
def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    scale: float,
    window: int,
) -> torch.Tensor:
    """Attend run by run, causally; the mask of a run is aligned to the lower right.

    Args:
        query: ``[T, heads, head_dim]``.
        key: ``[keys, kv_heads, head_dim]``.
        value: ``[keys, kv_heads, value_dim]``.
        bounds: cumulated lengths of the runs' queries and keys, int64 ``[2, runs + 1]``, on the host.
        scale: factor of the logits.
        window: number of last keys that each query sees, its own included; 0: all.

    Returns:
        ``[T, heads, value_dim]``, in the dtype of ``query``.
    """
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    for queries, keys in _runs(bounds):
        weights, _ = _weights(query[queries], key[keys], scale, window)
        out[queries] = _merge(weights @ _heads(value[keys])).to(out.dtype)
    return out


@attend.register_fake
def _(query: Any, key: Any, value: Any, bounds: Any, scale: float, window: int) -> torch.Tensor:
    return query.new_empty(*query.shape[:-1], value.shape[-1])


@operator("attend_backward")
def attend_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    scale: float,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value; the weights are computed again, run by run."""
    by_query, by_key, by_value = (
        torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (query, key, value)
    )
    for queries, keys in _runs(bounds):
        weights, grouped = _weights(query[queries], key[keys], scale, window)
        slope = _group(gradient[queries], key.shape[1])
        by_weights = slope @ _heads(value[keys]).transpose(-1, -2)
        by_logits = weights * (by_weights - (by_weights * weights).sum(-1, keepdim=True)) * scale
        by_query[queries] = _merge(by_logits @ _heads(key[keys])).to(query.dtype)
        by_key[keys] = (by_logits.transpose(-1, -2) @ grouped).sum(1).transpose(0, 1).to(key.dtype)
        by_value[keys] = (weights.transpose(-1, -2) @ slope).sum(1).transpose(0, 1).to(value.dtype)
    return by_query, by_key, by_value


@attend_backward.register_fake
def _(
    gradient: Any, query: Any, key: Any, value: Any, bounds: Any, scale: float, window: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    by_query, by_key, by_value = (
        torch.empty_like(t, memory_format=torch.contiguous_format) for t in (query, key, value)
    )
    return by_query, by_key, by_value


def _save(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    *tensors, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, gradient: torch.Tensor) -> tuple:
    return (*torch.ops.megarl.attend_backward(gradient, *ctx.saved_tensors, ctx.scale, ctx.window), None, None, None)


attend.register_autograd(_differentiate, setup_context=_save)


def _runs(bounds: torch.Tensor) -> list[tuple[slice, slice]]:
    """Return the places of each run's queries and keys; runs without tokens are left out."""
    queries, keys = bounds.tolist()
    starts = zip(queries, queries[1:], keys, keys[1:], strict=False)
    return [(slice(begin, end), slice(first, last)) for begin, end, first, last in starts if end > begin]


def _heads(states: torch.Tensor) -> torch.Tensor:
    """Return ``[T, kv_heads, dim]`` as float32 ``[kv_heads, 1, T, dim]``."""
    return states.transpose(0, 1).unsqueeze(1).to(torch.promote_types(states.dtype, torch.float32))


def _group(states: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Return ``[T, heads, dim]`` as float32 ``[kv_heads, heads of each, T, dim]``."""
    wide = states.to(torch.promote_types(states.dtype, torch.float32))
    return wide.unflatten(1, (kv_heads, -1)).movedim(0, 2)


def _merge(grouped: torch.Tensor) -> torch.Tensor:
    """Return ``[kv_heads, heads of each, T, dim]`` as ``[T, heads, dim]``."""
    return grouped.movedim(2, 0).flatten(1, 2)


def _weights(query: torch.Tensor, key: torch.Tensor, scale: float, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention weights ``[kv_heads, heads of each, queries, keys]`` and the grouped queries."""
    grouped = _group(query, key.shape[1])
    before = len(key) - len(query)
    seen = query.new_ones(len(query), len(key), dtype=torch.bool).tril(before)
    if window:
        seen = seen.triu(before - window + 1)
    logits = (grouped @ _heads(key).transpose(-1, -2) * scale).masked_fill(~seen, -torch.inf)
    return logits.softmax(-1), grouped


@operator("gather_rows")
def gather_rows(local: torch.Tensor, rows: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """Gather all CP ranks' tokens ``[T, ...]`` and select ``rows``; ``size`` is the number of ranks."""
    whole = local.new_empty(size * local.shape[0], *local.shape[1:])
    dist.all_gather_into_tensor(whole, local.contiguous(), group=_resolve_process_group(group))
    return whole.index_select(0, rows)


@gather_rows.register_fake
def _(local: torch.Tensor, rows: torch.Tensor, group: str, size: int) -> torch.Tensor:
    return local.new_empty(rows.shape[0], *local.shape[1:])


@operator("sum_rows")
def sum_rows(gradient: torch.Tensor, rows: torch.Tensor, like: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """Return the gradient of ``gather_rows``'s input, shaped like ``like``: each token's, summed over all ranks.

    The sum is in float32 and rounded once, as by one kernel that sees all queries.
    """
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    whole = gradient.new_zeros(size * like.shape[0], *like.shape[1:], dtype=dtype)
    whole.index_add_(0, rows, gradient.to(dtype))
    local = whole.new_empty(like.shape)
    dist.reduce_scatter_tensor(local, whole, group=_resolve_process_group(group))
    return local.to(gradient.dtype)


@sum_rows.register_fake
def _(gradient: torch.Tensor, rows: torch.Tensor, like: torch.Tensor, group: str, size: int) -> torch.Tensor:
    return gradient.new_empty(like.shape)


def _save_rows(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    local, rows, ctx.group, ctx.size = inputs
    ctx.save_for_backward(local, rows)


def _sum(ctx: Any, gradient: torch.Tensor) -> tuple:
    local, rows = ctx.saved_tensors
    return torch.ops.megarl.sum_rows(gradient, rows, local, ctx.group, ctx.size), None, None, None


gather_rows.register_autograd(_sum, setup_context=_save_rows)
