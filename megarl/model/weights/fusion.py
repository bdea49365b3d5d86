# SPDX-License-Identifier: Apache-2.0
"""Split fused linears into their parts. Only this module knows how the parts are interleaved."""

from dataclasses import dataclass
from typing import Any

import torch

from megarl.families.base import Fusion


@dataclass(frozen=True)
class HeadLayout:
    """Attention heads on this tensor-parallel rank: ``groups`` KV heads, each with ``queries`` query heads.

    ``copies`` neighbouring ranks hold the same KV heads, each with other query heads.
    """

    groups: int
    queries: int
    head_dim: int
    copies: int = 1


def head_layout(config: Any) -> HeadLayout:
    """Return this rank's heads from a ``TransformerConfig``."""
    groups = config.num_query_groups or config.num_attention_heads
    return HeadLayout(
        groups=groups // config.tensor_model_parallel_size,
        queries=config.num_attention_heads // groups,
        head_dim=config.kv_channels,
        copies=getattr(config, "kv_copies", 1),
    )


def part_views(fused: torch.Tensor, fusion: Fusion, heads: HeadLayout) -> tuple[torch.Tensor, ...]:
    """Return views of the parts of a fused weight ``[out, ...]`` or bias ``[out]``, in the order of ``LinearMap.hf``.

    Writing to a view writes to the fused tensor. Reshaped to ``[-1, *fused.shape[1:]]``, a view holds this rank's rows
    of the Hugging Face tensor in Hugging Face's order.
    """
    if fusion == "single":
        return (fused,)
    if fusion == "gated":
        return tuple(fused.chunk(2, dim=0))
    grouped = fused.view(heads.groups, heads.queries + 2, heads.head_dim, *fused.shape[1:])
    return grouped[:, : heads.queries], grouped[:, heads.queries], grouped[:, heads.queries + 1]


def part_rows(total_rows: int, fusion: Fusion, heads: HeadLayout) -> tuple[int, ...]:
    """Return the output rows of each part on this rank, for a fused layer with ``total_rows`` rows on this rank."""
    if fusion == "single":
        return (total_rows,)
    if fusion == "gated":
        return (total_rows // 2, total_rows // 2)
    kv = heads.groups * heads.head_dim
    return (kv * heads.queries, kv, kv)


def part_copies(fusion: Fusion, heads: HeadLayout) -> tuple[int, ...]:
    """Return, for each part, the number of neighbouring ranks that hold the same rows."""
    if fusion == "qkv":
        return 1, heads.copies, heads.copies
    return (1,) if fusion == "single" else (1, 1)


def split_heads(fused: torch.Tensor, heads: HeadLayout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split the output ``[T, 1, out]`` of a fused "qkv" linear into q, k and v, each ``[T, 1, heads, head_dim]``."""
    grouped = fused.view(*fused.shape[:-1], heads.groups, heads.queries + 2, heads.head_dim)
    # split, not slices: its backward pass is one concatenation; that of each slice allocates zeros.
    query, key, value = grouped.split((heads.queries, 1, 1), dim=-2)
    return query.flatten(-3, -2), key.squeeze(-2), value.squeeze(-2)
