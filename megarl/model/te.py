"""The ``te`` back end: Transformer Engine's linears with fused norms, its norms, activation and packed attention.

Import this module only where Transformer Engine is installed (``backends`` sees to it): without it, mcore's classes for
it are not classes.
"""

from typing import Any

import torch
from megatron.core.extensions.transformer_engine import (
    TEActivationOp,
    TEDotProductAttention,
    TELayerNormColumnParallelLinear,
    TENorm,
    TERowParallelLinear,
)
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer import ModuleSpec, TransformerConfig, TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megarl.model.attention import PackedAttention, PackedSequences
from megarl.model.experts import local_expert_spec, stage_layers


def te_block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Transformer block in which the norms of attention and of dense MLPs are part of the linear that follows them.

    Mixtures of experts are those of the ``local`` back end, behind a norm of their own.
    """
    attention = _attention_spec(config)
    dense, sparse = _dense_layer(attention), _sparse_layer(attention, config)
    layers = [sparse if has_experts else dense for has_experts in stage_layers(config, vp_stage)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=TENorm)


def _attention_spec(config: TransformerConfig) -> ModuleSpec:
    head_norm: Any = TENorm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=TELayerNormColumnParallelLinear,
            # Ours splits packed sequences over CP ranks as the model's RoPE and loss expect them.
            core_attention=PackedTEAttention if config.context_parallel_size == 1 else PackedAttention,
            linear_proj=TERowParallelLinear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )


def _dense_layer(attention: ModuleSpec) -> ModuleSpec:
    mlp = ModuleSpec(
        module=MLP,
        submodules=MLPSubmodules(
            linear_fc1=TELayerNormColumnParallelLinear, linear_fc2=TERowParallelLinear, activation_func=TEActivationOp
        ),
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _sparse_layer(attention: ModuleSpec, config: TransformerConfig) -> ModuleSpec:
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=TENorm,
            mlp=local_expert_spec(config),
            mlp_bda=get_bias_dropout_add,
        ),
    )


class PackedTEAttention(TEDotProductAttention):
    """TE's variable-length ("thd") attention behind the interface of ``PackedAttention``."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        # TE has no fused kernel for float32, and its unfused one holds whole score matrices.
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
        """Attend within each packed sequence; shapes as for ``PackedAttention``."""
        if query.dtype == torch.float32:
            return self.exact(query, key, value, None, packed_seq_params=packed_seq_params)
        out = super().forward(
            query.squeeze(1),
            key.squeeze(1),
            # A view into the fused projection: TE would look for a layout of the three twice before it copied this one.
            value.squeeze(1).contiguous(),
            None,
            attn_mask_type,
            packed_seq_params=packed_seq_params.thd,
        )
        return out.view(out.shape[0], 1, -1)
