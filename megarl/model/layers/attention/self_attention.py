# SPDX-License-Identifier: Apache-2.0
"""Self-attention for packed tokens on the linears of either back end."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention

from megarl.model.layers.attention.core import PackedSequences
from megarl.model.layers.packed_config import PackedConfig
from megarl.model.layers.pointwise import apply_rope, has_kernels, wants_kernels
from megarl.model.layers.regions import traced
from megarl.model.layers.updates import Outcome, Update, apart, projection
from megarl.model.weights.fusion import head_layout, split_heads

# Least head_dim of which the kernel that adds an update has tiles: a product needs 16 columns of a half.
LEAST_WIDTH = 32


class PackedSelfAttention(SelfAttention):
    """mcore's layer with a forward pass reduced to what training on packed tokens needs.

    On CUDA in 16 bits, one Triton kernel does everything between the projection and attention, unless the norms of
    queries and keys are trained.

    Attributes:
        leaves_updates: True if the layer adds the update of ``linear_proj``; set by the layer.
        heads: this rank's heads.
    """

    leaves_updates = False

    def __init__(self, config: PackedConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config.with_bias(True) if config.attention_bias else config, *args, **kwargs)
        self.heads = head_layout(self.config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        rotary_pos_emb: torch.Tensor,
        packed_seq_params: PackedSequences,
        low: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Outcome:
        """Attend, as ``LatentAttention.forward`` does.

        Args:
            hidden_states, attention_mask, packed_seq_params: see there.
            rotary_pos_emb: ``[T, 1, 1, head_dim]``.
            low: the product of ``hidden_states`` and ``projection``, where that is not None.
            kwargs: ignored.
        """
        query, key, value = self.heads_of(hidden_states, rotary_pos_emb, low)
        # A traced attention keeps no weights that could be recomputed.
        recomputed = self.checkpoint_core_attention and self.training and not traced()
        attend = self._checkpointed_attention_forward if recomputed else self.core_attention
        out = attend(query, key, value, None, attn_mask_type=self.attn_mask_type, packed_seq_params=packed_seq_params)
        return self.project(out)

    def attend(self, heads: Sequence[torch.Tensor], packed: PackedSequences) -> torch.Tensor:
        """Return the attention of what ``heads_of`` returns, ``[T, 1, heads * head_dim]``; for ``project``."""
        return self.core_attention(*heads, None, attn_mask_type=self.attn_mask_type, packed_seq_params=packed)

    def project(self, out: torch.Tensor) -> Outcome:
        """Return the layer's output of what attention has returned."""
        leaves = self.leaves_updates and wants_kernels(out)
        return apart(self.linear_proj, out) if leaves else self.linear_proj(out)

    def projection(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return every A of ``linear_qkv``, ``[R, H]``, if ``forward`` takes the product of its input with them."""
        return projection(self.linear_qkv) if self._takes_updates(hidden) else None

    def _takes_updates(self, hidden: torch.Tensor) -> bool:
        """Return True if a kernel adds the update of ``linear_qkv``."""
        return wants_kernels(hidden) and self.has_wide_heads(hidden)

    def has_wide_heads(self, hidden: torch.Tensor) -> bool:
        """Return True if a kernel can add the update of ``linear_qkv``, in a trace too."""
        return self._has_kernel(hidden) and self.heads.head_dim >= LEAST_WIDTH

    def heads_of(
        self, hidden: torch.Tensor, angles: torch.Tensor, low: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Return normed and rotated queries and keys, and values, each ``[T, 1, heads, head_dim]``."""
        takes = self._takes_updates(hidden)
        fused, update = apart(self.linear_qkv, hidden, low) if takes else self.linear_qkv(hidden)
        if isinstance(update, Update):
            from megarl.model.layers.kernels.adapted_heads import prepare_adapted_heads

            norms, eps = self.norms(), self.config.layernorm_epsilon
            return prepare_adapted_heads(fused, angles, norms, eps, self.heads, update)
        return self._split_by_kernel(fused, angles) if self._has_kernel(fused) else self._split(fused, angles)

    def norms(self) -> tuple[torch.Tensor, ...]:
        """Return the weights of the query and key norms, if the model has them."""
        weights = (getattr(norm, "weight", None) for norm in (self.q_layernorm, self.k_layernorm))
        return tuple(weight for weight in weights if weight is not None)

    def _has_kernel(self, fused: torch.Tensor) -> bool:
        frozen = not any(weight.requires_grad for weight in self.norms())
        return has_kernels(fused) and frozen

    def _split_by_kernel(self, fused: torch.Tensor, angles: torch.Tensor) -> tuple[torch.Tensor, ...]:
        eps, heads = self.config.layernorm_epsilon, self.heads
        if traced():
            layout = [heads.groups, heads.queries, heads.head_dim]
            return torch.ops.megarl.prepare_heads(fused, angles, list(self.norms()), eps, layout)
        from megarl.model.layers.kernels.heads import prepare_heads

        return prepare_heads(fused, angles, self.norms(), eps, heads)

    def _split(self, fused: torch.Tensor, angles: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return normed and rotated queries and keys, and values, each ``[T, 1, heads, head_dim]``."""
        query, key, value = split_heads(fused, self.heads)
        if self.norms():
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        turned = [apply_rope(states, angles, self.config, self.pg_collection.cp) for states in (query, key)]
        return turned[0], turned[1], value
