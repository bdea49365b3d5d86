# SPDX-License-Identifier: Apache-2.0
"""Describe the transformer block that all back ends share, made of the layers of one of them."""

from dataclasses import dataclass
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer import (
    MLATransformerConfig,
    ModuleSpec,
    TransformerConfig,
    TransformerLayerSubmodules,
)
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megarl.model.layers.attention.latent_attention import LatentAttention
from megarl.model.layers.attention.self_attention import PackedSelfAttention
from megarl.model.layers.experts.spec import local_expert_spec, stage_layers
from megarl.model.layers.mlp import PackedMLP
from megarl.model.layers.transformer_layer import PackedLayer
from megarl.parallel import mcore


@dataclass(frozen=True)
class Parts:
    """The layer classes of a back end, under mcore's interfaces.

    Attributes:
        norm: norm of the hidden states, and of the attention heads where the model has such.
        column, row: linears of attention and of dense MLPs.
        core_attention: attention over packed sequences.
        activation: activation of dense MLPs.
        fused_norm: True if ``column`` normalises its own input, so that no norm module stands in front of it.
        self_attention, mlp: attention of models without latent attention, and dense MLPs.
    """

    norm: Any
    column: type
    row: type
    core_attention: type
    activation: Any
    fused_norm: bool = False
    self_attention: type = PackedSelfAttention
    mlp: type = PackedMLP


def block_of(parts: Parts, config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Return the spec of the block that this rank builds for a virtual pipeline stage.

    Every back end takes its experts from ``megarl.model.layers.experts``, behind a norm module of their own.
    """
    attention = _attention(parts, config)
    linears = MLPSubmodules(linear_fc1=parts.column, linear_fc2=parts.row, activation_func=parts.activation)
    dense = mcore.mlp_spec(parts.mlp, linears)
    layers = [
        _layer(parts, attention, local_expert_spec(config), parts.norm)
        if sparse
        else _layer(parts, attention, dense, _before_column(parts))
        for sparse in stage_layers(config, vp_stage)
    ]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=parts.norm)


def _before_column(parts: Parts) -> Any:
    """The norm in front of a column-parallel linear; the identity where the linear normalises its input."""
    return IdentityOp if parts.fused_norm else parts.norm


def _attention(parts: Parts, config: TransformerConfig) -> ModuleSpec:
    if isinstance(config, MLATransformerConfig):
        return ModuleSpec(module=LatentAttention, params={"norm": parts.norm})
    head_norm = parts.norm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=parts.self_attention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=parts.column,
            core_attention=parts.core_attention,
            linear_proj=parts.row,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )


def _layer(parts: Parts, attention: ModuleSpec, mlp: Any, before_mlp: Any) -> ModuleSpec:
    return ModuleSpec(
        module=PackedLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=_before_column(parts),
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=before_mlp,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )
