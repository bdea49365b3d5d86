"""How the parts of a fused linear lie in its weight and in its output; the only place that knows the interleaving."""

from dataclasses import dataclass

import torch

from megarl.model.families.base import Fusion


@dataclass(frozen=True)
class HeadLayout:
    """Attention heads on this tensor-parallel rank: ``groups`` KV heads, each with ``queries`` query heads."""

    groups: int
    queries: int
    head_dim: int


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
