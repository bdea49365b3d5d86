# SPDX-License-Identifier: Apache-2.0
"""Modules of a bitwise model: linears, norms, attention and MLP, under mcore's interfaces.

A layer's residual stream is rounded after every addition, as mcore's is without these modules; the sampler's norm does
the same. Everything else between token ids and hidden states is here.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megarl.bitwise.linear import linear
from megarl.model.layers.attention.core import PackedAttention, PackedSequences
from megarl.model.layers.attention.self_attention import PackedSelfAttention
from megarl.model.layers.bitwise import ops
from megarl.model.layers.block import Parts, block_of
from megarl.model.layers.gpt import RMSNorm
from megarl.model.layers.mlp import PackedMLP
from megarl.model.layers.pointwise import SwiGLU


class BitwiseNorm(RMSNorm):
    """Root mean square norm."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        return ops.rms_norm(hidden.view(-1, hidden.shape[-1]), self.weight, self.eps).view(hidden.shape)

    def beside(
        self, hidden: torch.Tensor, matrix: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the norm of ``hidden``, ``hidden``, and None."""
        return self(hidden), hidden, None


class _Linear:
    """Forward pass of a linear that holds all of its weight."""

    bitwise = True
    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        """Return ``[..., N]`` with the bias added, and None for the bias that mcore would add."""
        out = linear(hidden.view(-1, hidden.shape[-1]), self.weight, self.bias)
        return out.view(*hidden.shape[:-1], -1), None


class BitwiseColumn(_Linear, ColumnParallelLinear):
    """mcore's column-parallel linear, without tensor parallelism."""


class BitwiseRow(_Linear, RowParallelLinear):
    """mcore's row-parallel linear, without tensor parallelism."""


class BitwiseAttention(PackedAttention):
    """Causal attention within each packed sequence."""

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
        """Attend; see ``PackedAttention``."""
        query, key, value = (tensor.squeeze(1) for tensor in (query, key, value))
        bounds, longest = packed_seq_params.query_bounds, packed_seq_params.longest_query
        scale = query.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale
        out, _ = ops.attend(query, key, value, bounds, longest, scale)
        return out.view(len(out), 1, -1)


class BitwiseSelfAttention(PackedSelfAttention):
    """Self-attention whose heads are split, normalised and rotated by one operation."""

    def _has_kernel(self, fused: torch.Tensor) -> bool:
        return True

    def _split_by_kernel(self, fused: torch.Tensor, angles: torch.Tensor) -> tuple[torch.Tensor, ...]:
        heads = self.heads
        layout = [heads.groups, heads.queries, heads.head_dim]
        angles = angles.view(len(angles), -1)
        states = ops.prepare_heads(
            fused.view(len(fused), -1), angles, list(self.norms()), self.config.layernorm_epsilon, layout
        )
        return tuple(state.unsqueeze(1) for state in states)


class BitwiseMLP(PackedMLP):
    """Gated MLP."""

    def forward(
        self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ``[T, 1, hidden]``, and None for the bias that mcore would add."""
        fused, _ = self.linear_fc1(hidden_states)
        active = ops.swiglu(fused.view(len(fused), -1))
        return self.linear_fc2(active.view(len(fused), 1, -1))


def bitwise_block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Return the spec of a block made of these modules."""
    parts = Parts(
        BitwiseNorm,
        BitwiseColumn,
        BitwiseRow,
        BitwiseAttention,
        SwiGLU,
        self_attention=BitwiseSelfAttention,
        mlp=BitwiseMLP,
    )
    return block_of(parts, config, vp_stage)
