# SPDX-License-Identifier: Apache-2.0
"""How the parts of a fused linear lie in its weight and in its output; the only place that knows the interleaving."""

from dataclasses import dataclass
from typing import Any

import torch

from megarl.families.base import Fusion


@dataclass(frozen=True)
class HeadLayout:
    """Attention heads on this tensor-parallel rank: ``groups`` KV heads, each with ``queries`` query heads.

    ``copies`` neighbouring ranks hold the same KV heads, with other query heads.
    """

    groups: int
    queries: int
    head_dim: int
    copies: int = 1


def head_layout(config: Any) -> HeadLayout:
    """Heads on this rank, from a ``TransformerConfig``."""
    groups = config.num_query_groups or config.num_attention_heads
    return HeadLayout(
        groups=groups // config.tensor_model_parallel_size,
        queries=config.num_attention_heads // groups,
        head_dim=config.kv_channels,
        copies=getattr(config, "kv_copies", 1),
    )


def part_views(fused: torch.Tensor, fusion: Fusion, heads: HeadLayout) -> tuple[torch.Tensor, ...]:
    """Views of the parts of a fused weight ``[out, ...]`` or bias ``[out]``, in the order of ``LinearMap.hf``.

    Writing to a view writes to the fused tensor. Reshaped to ``[-1, *fused.shape[1:]]`` a view is this rank's rows of
    the Hugging Face tensor, in Hugging Face's order.
    """
    if fusion == "single":
        return (fused,)
    if fusion == "gated":
        return tuple(fused.chunk(2, dim=0))
    grouped = fused.view(heads.groups, heads.queries + 2, heads.head_dim, *fused.shape[1:])
    return grouped[:, : heads.queries], grouped[:, heads.queries], grouped[:, heads.queries + 1]


def part_rows(total_rows: int, fusion: Fusion, heads: HeadLayout) -> tuple[int, ...]:
    """Output rows of each part on this rank, for a fused layer of ``total_rows`` rows on this rank."""
    if fusion == "single":
        return (total_rows,)
    if fusion == "gated":
        return (total_rows // 2, total_rows // 2)
    kv = heads.groups * heads.head_dim
    return (kv * heads.queries, kv, kv)


def part_copies(fusion: Fusion, heads: HeadLayout) -> tuple[int, ...]:
    """How many neighbouring ranks hold the same rows of each part."""
    if fusion == "qkv":
        return 1, heads.copies, heads.copies
    return (1,) if fusion == "single" else (1, 1)


def split_heads(fused: torch.Tensor, heads: HeadLayout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values ``[T, 1, heads, head_dim]`` in the output ``[T, 1, out]`` of a fused "qkv" linear."""
    grouped = fused.view(*fused.shape[:-1], heads.groups, heads.queries + 2, heads.head_dim)
    # Not by indices: the backward pass of a split is one concatenation, that of each slice a tensor of zeros.
    query, key, value = grouped.split((heads.queries, 1, 1), dim=-2)
    return query.flatten(-3, -2), key.squeeze(-2), value.squeeze(-2)
