# SPDX-License-Identifier: Apache-2.0
"""The ``te`` back end: megarl's layers with Transformer Engine's packed attention and RoPE.

TE's norms and linears stay out. Its norms take the host longer than the GPU. Its linears cannot leave an adapter's
update to the next kernel (``updates``), nor run their collectives beside products (``megarl.lora.layers.overlapped``).

Import this module only where Transformer Engine is installed (``backends`` checks that). Elsewhere mcore's classes for
it do not exist.
"""

from typing import Any

import torch
from megatron.core.extensions.transformer_engine import (
    TEActivationOp,
    TEDotProductAttention,
    TELayerNormColumnParallelLinear,
    TERowParallelLinear,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megarl.model.layers.attention.core import PackedAttention, PackedSequences
from megarl.model.layers.block import Parts, block_of
from megarl.model.layers.gpt import RMSNorm
from megarl.model.layers.linears import ColumnParallelLinear, RowParallelLinear
from megarl.model.layers.pointwise import SwiGLU


def te_block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Return the spec of a block with TE's attention."""
    parts = Parts(RMSNorm, ColumnParallelLinear, RowParallelLinear, _attention(config), SwiGLU)
    return block_of(parts, config, vp_stage)


def whole_te_block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Return the spec of a block whose linears are TE's too and include the norms of attention and of dense MLPs.

    Training of all weights is measured with it (`megarl bench train`), as mcore's users run it.
    """
    linears = TELayerNormColumnParallelLinear, TERowParallelLinear
    return block_of(Parts(RMSNorm, *linears, _attention(config), TEActivationOp, fused_norm=True), config, vp_stage)


def _attention(config: TransformerConfig) -> type:
    # PackedAttention splits sequences over CP ranks in the way that the model's RoPE and loss expect.
    return PackedTEAttention if config.context_parallel_size == 1 else PackedAttention


class PackedTEAttention(TEDotProductAttention):
    """TE's variable-length ("thd") attention with the interface of ``PackedAttention``."""

    can_trace = False

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        # TE has no fused kernel for float32; its unfused one would hold whole score matrices.
        self.exact = PackedAttention(config, *args, **kwargs)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType,
        *,
        packed_seq_params: PackedSequences,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend within each packed sequence. Shapes are those of ``PackedAttention``."""
        # TE takes the window from the config, so each layer would need a config of its own.
        if query.dtype == torch.float32 or self.exact.window is not None:
            return self.exact(query, key, value, None, packed_seq_params=packed_seq_params)
        out = super().forward(
            query.squeeze(1),
            key.squeeze(1),
            # The value is a view into the fused projection. TE would search for a layout of all three twice before
            # copying it.
            value.squeeze(1).contiguous(),
            None,
            attn_mask_type,
            packed_seq_params=packed_seq_params.thd,
        )
        return out.view(out.shape[0], 1, -1)
