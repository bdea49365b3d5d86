# SPDX-License-Identifier: Apache-2.0
"""Describe a mixture of experts to mcore, and say which layers have one."""

from typing import Any

import torch
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megarl.model.layers.experts.dispatch import PackedMoELayer
from megarl.model.layers.experts.packed import PackedExperts
from megarl.model.layers.experts.routers import GroupLimitedRouter, LocalRouter
from megarl.model.layers.experts.shared import SharedExperts
from megarl.model.layers.linears import ColumnParallelLinear, RowParallelLinear


def local_expert_spec(config: TransformerConfig) -> ModuleSpec:
    """Return the spec of a mixture of experts that takes the place of an MLP."""
    grouped = config.moe_router_num_groups or config.moe_router_score_function == "sigmoid"
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return ModuleSpec(
        module=PackedMoELayer,
        submodules=MoESubmodules(
            router=GroupLimitedRouter if grouped else LocalRouter,
            experts=ModuleSpec(module=PackedExperts, submodules=linears),
            shared_experts=ModuleSpec(module=SharedExperts, submodules=linears),
        ),
    )


def release_graphs(model: torch.nn.Module) -> None:
    """Let a model with experts be freed after it has run.

    mcore's dispatchers keep the routing weights, and these keep the autograd graph, which leads back to the model
    through DDP's hooks. The garbage collector does not see that cycle.
    """

    def forget(layer: MoELayer, inputs: Any, output: Any) -> None:
        layer.token_dispatcher.probs = None

    for module in model.modules():
        if isinstance(module, MoELayer):
            module.register_forward_hook(forget)


def sparse_layers(config: TransformerConfig) -> list[bool]:
    """For each layer of the whole model: True if it has experts."""
    if not config.num_moe_experts:
        return [False] * config.num_layers
    pattern = config.moe_layer_freq
    if isinstance(pattern, int):
        return [layer % pattern == 0 for layer in range(config.num_layers)]
    return [bool(kind) for kind in pattern]


def stage_layers(config: TransformerConfig, vp_stage: int | None) -> list[bool]:
    """For each layer that this rank builds for a virtual pipeline stage: True if it has experts."""
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    return sparse_layers(config)[first : first + get_num_layers_to_build(config, vp_stage=vp_stage)]
