"""The mixture of experts of the ``local`` back end: mcore's router, dispatcher and one MLP per expert."""

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP


class LocalRouter(TopKRouter):
    """mcore's router; its own gating names a Transformer Engine function even where that is not installed."""

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Logits ``[..., experts]`` in the model's dtype, as Hugging Face computes them."""
        return F.linear(input, self.weight)


def local_expert_spec() -> ModuleSpec:
    """A mixture of experts in place of an MLP."""
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(
            router=LocalRouter,
            experts=ModuleSpec(module=SequentialMLP, submodules=linears),
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=linears),
        ),
    )


def sparse_layers(config: TransformerConfig) -> list[bool]:
    """For each layer of the whole model, whether it has experts."""
    if not config.num_moe_experts:
        return [False] * config.num_layers
    pattern = config.moe_layer_freq
    if isinstance(pattern, int):
        return [layer % pattern == 0 for layer in range(config.num_layers)]
    return [bool(kind) for kind in pattern]
