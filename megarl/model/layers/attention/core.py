# SPDX-License-Identifier: Apache-2.0
"""Core attention over packed sequences for mcore's linears: SDPA on a CPU, variable-length flash attention on CUDA."""

import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams

from megarl.cuda_memory import upload
from megarl.model.layers.attention.traced_attention import TracedPack
from megarl.model.layers.attention.varlen import HAS_WINDOWS, attend_varlen
from megarl.model.layers.attention.zigzag import key_rows, rank_runs

# Neither "sbhd" nor "thd". With any other format mcore applies RoPE from one angle per token, which PackedGPTModel
# prepares, and does not loop over the sequences of a pack.
PACKED_FORMAT = "packed"


@dataclass
class PackedSequences(PackedSeqParams):
    """mcore's record of a pack, with the lengths also on the host, so that no layer waits for the device.

    ``cu_seqlens_q`` and ``cu_seqlens_kv`` are the bounds of the sequences in the whole pack, context-parallel padding
    included, as Transformer Engine's thd attention takes them. ``max_seqlen_*`` is the longest sequence.

    Attributes:
        lengths: tokens of each sequence in the whole pack, padding included; they add up to T * CP.
        context: CP size.
        query_lengths: tokens of each run on this rank (see ``zigzag``); they add up to T. Without CP a run is a
            sequence.
        key_lengths: number of keys of each run. The run's causal mask is aligned to the lower right.
        query_bounds, key_bounds: cumulated lengths, int32 ``[runs + 1]``.
        longest_query, longest_key: upper bounds of those lengths.
        key_rows: rows of those keys in the pack gathered from all CP ranks, int64; None without CP.
    """

    lengths: tuple[int, ...] = ()
    context: int = 1
    query_lengths: tuple[int, ...] = ()
    key_lengths: tuple[int, ...] = ()
    query_bounds: torch.Tensor | None = None
    key_bounds: torch.Tensor | None = None
    longest_query: int = 0
    longest_key: int = 0
    key_rows: torch.Tensor | None = None

    @classmethod
    def from_lengths(
        cls,
        lengths: tuple[int, ...],
        device: torch.device,
        *,
        context: int = 1,
        context_rank: int = 0,
        bounds: torch.Tensor | None = None,
    ) -> "PackedSequences":
        """Describe a pack of sequences that lie one after the other; ``lengths`` include the padding.

        ``bounds`` is ``bounds_of(lengths)`` on the device, if it is there already.
        """
        bounds = upload(bounds_of(lengths), device) if bounds is None else bounds
        longest = max(lengths)
        runs = rank_runs(lengths, context, context_rank)
        queries, keys = tuple(run.length for run in runs), tuple(run.keys for run in runs)
        return cls(
            qkv_format=PACKED_FORMAT,
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            lengths=lengths,
            context=context,
            query_lengths=queries,
            key_lengths=keys,
            query_bounds=bounds if context == 1 else upload(bounds_of(queries), device),
            key_bounds=bounds if context == 1 else upload(bounds_of(keys), device),
            longest_query=max(queries),
            longest_key=max(keys),
            key_rows=None
            if context == 1
            else upload(torch.from_numpy(key_rows(lengths, context, context_rank)), device),
        )

    @cached_property
    def thd(self) -> "PackedSequences":
        """A copy that carries Transformer Engine's name for the format."""
        renamed = copy.copy(self)
        renamed.qkv_format = "thd"
        return renamed

    @cached_property
    def traced(self) -> TracedPack:
        """The pack in a form for torch.compile, with the sizes marked that change."""
        host = torch.tensor([[0, *accumulate(runs)] for runs in (self.query_lengths, self.key_lengths)])
        bounds, rows = self.query_bounds, self.key_bounds
        assert bounds is not None and rows is not None
        # At least 2: torch.compile takes a size of 1 for a constant.
        query_room, key_room = (bounds.new_empty(max(n, 2), 0) for n in (self.longest_query, self.longest_key))
        return TracedPack(bounds, rows, host, query_room, key_room, self.key_rows).mark()

    def bounded(self, bounds: torch.Tensor, longest: int) -> "PackedSequences":
        """Copy with other bounds, which may go on with empty sequences, and ``longest`` as the limit (for CUDA graphs).

        Args:
            bounds: int32 ``[at least as many]``.
            longest: no sequence is longer.
        """
        assert self.context == 1
        copied = copy.copy(self)
        for cached in ("thd", "traced"):
            copied.__dict__.pop(cached, None)
        copied.cu_seqlens_q = copied.cu_seqlens_kv = copied.query_bounds = copied.key_bounds = bounds
        copied.max_seqlen_q = copied.max_seqlen_kv = copied.longest_query = copied.longest_key = longest
        return copied


def bounds_of(lengths: tuple[int, ...]) -> torch.Tensor:
    """Return the cumulated lengths, int32 ``[sequences + 1]``, on the host."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


class PackedAttention(torch.nn.Module):
    """Causal attention within each packed sequence; mcore's ``core_attention`` for the ``local`` back end.

    Attributes:
        window: number of tokens that a token attends to, itself included; None for all before it.
        can_trace: True if torch.compile can trace it, with a ``TracedPack``.

    Takes query ``[T, 1, heads, head_dim]``, key ``[T, 1, kv_heads, head_dim]`` and value ``[T, 1, kv_heads,
    value_dim]`` of this rank's tokens; returns ``[T, 1, heads * value_dim]``.

    Under context parallelism every layer gathers the keys and values of the whole pack, and each run attends to its
    sequence up to the run's end. No masked block is computed, and all ranks do the same amount of work. Unless it is
    recomputed, a layer keeps about T * (CP + 1/2) keys and values instead of T until its backward pass.
    """

    can_trace = True

    def __init__(
        self, config: Any, *args: Any, softmax_scale: float | None = None, pg_collection: Any = None, **kwargs: Any
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        windows = getattr(config, "windows", ())
        self.window: int | None = windows[kwargs["layer_number"] - 1] if windows else None
        self.context = getattr(pg_collection, "cp", None)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        packed_seq_params: PackedSequences,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend. The mask follows from ``packed_seq_params``; ``attention_mask`` is not used."""
        query, key, value = (tensor.squeeze(1) for tensor in (query, key, value))
        if isinstance(packed_seq_params, TracedPack):
            return self._attend_traced(query, key, value, packed_seq_params)
        if packed_seq_params.key_rows is not None:
            key, value = (_GatherRows.apply(t, packed_seq_params.key_rows, self.context) for t in (key, value))
        out = attend_runs(query, key, value, packed_seq_params, self.softmax_scale, self.window)
        return out.reshape(out.shape[0], 1, -1)

    def _attend_traced(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: TracedPack
    ) -> torch.Tensor:
        """Attend in code that torch.compile traces. Shapes as in ``attend_runs``; returns ``[T, 1, ...]``."""
        if packed.key_rows is not None:
            assert self.context is not None
            name, size = self.context.group_name, self.context.size()
            key, value = (torch.ops.megarl.gather_rows(t, packed.key_rows, name, size) for t in (key, value))
        scale = query.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale
        if query.is_cuda and query.dtype != torch.float32 and (self.window is None or HAS_WINDOWS):
            out = attend_varlen(query, key, value, packed, scale, self.window)
        else:
            out = torch.ops.megarl.attend(query, key, value, packed.host_bounds, scale, self.window or 0)
        return out.reshape(out.shape[0], 1, -1)


class _GatherRows(torch.autograd.Function):
    """Gather all CP ranks' tokens and select ``rows``. Backward sums each token's gradient over all ranks."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.group, ctx.tokens = group, local.shape[0]
        whole = local.new_empty(group.size() * ctx.tokens, *local.shape[1:])
        dist.all_gather_into_tensor(whole, local.contiguous(), group=group)
        return whole.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (rows,) = ctx.saved_tensors
        # Summed in float32 and rounded once, as by one kernel that sees all queries.
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        whole = gradient.new_zeros(ctx.group.size() * ctx.tokens, *gradient.shape[1:], dtype=dtype)
        whole.index_add_(0, rows, gradient.to(dtype))
        local = whole.new_empty(ctx.tokens, *gradient.shape[1:])
        dist.reduce_scatter_tensor(local, whole, group=ctx.group)
        return local.to(gradient.dtype), None, None


def attend_runs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed: PackedSequences,
    scale: float | None,
    window: int | None = None,
) -> torch.Tensor:
    """Compute the attention of this rank's runs, each over its own keys, with causal masks aligned to the lower right.

    Args:
        query: ``[T, heads, head_dim]``.
        key: ``[sum(key_lengths), kv_heads, head_dim]``, the runs one after the other.
        value: ``[sum(key_lengths), kv_heads, value_dim]``, ``value_dim`` at most ``head_dim``.
        packed: the runs.
        scale: factor of the logits; default: 1 / sqrt(head_dim).
        window: number of last keys that each query sees, its own included; default: all.

    Returns:
        ``[T, heads, value_dim]``.
    """
    if window is not None and packed.longest_key <= window:
        window = None
    fast = query.is_cuda and query.dtype != torch.float32 and (window is None or HAS_WINDOWS)
    attend = attend_varlen if fast else _attend_each
    return attend(query, key, value, packed, scale, window)


def _attend_each(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed: PackedSequences,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """Call SDPA once per run, so that no work is spent across sequences."""
    queries = query.transpose(0, 1).split(packed.query_lengths, dim=1)
    keys, values = (tensor.transpose(0, 1).split(packed.key_lengths, dim=1) for tensor in (key, value))
    outs = []
    for q, k, v in zip(queries, keys, values, strict=True):
        before = k.shape[1] - q.shape[1]
        # SDPA's own causal mask is aligned to the upper left, so it fits only where keys and queries are equally many.
        mask = None
        if before or window is not None:
            mask = q.new_ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(before)
        if mask is not None and window is not None:
            mask = mask.triu(before - window + 1)
        outs.append(
            F.scaled_dot_product_attention(
                q[None], k[None], v[None], attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
            )[0]
        )
    return torch.cat(outs, dim=1).transpose(0, 1)
