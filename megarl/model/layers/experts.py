# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts of the ``local`` back end: mcore's router and dispatcher, and one MLP per expert."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megarl.model.layers.expert_dispatch import PackedMoELayer
from megarl.model.layers.grouped_experts import GroupedLinear, place_together, wants_groups, weighted_swiglu
from megarl.model.layers.linears import ColumnParallelLinear, RowParallelLinear


class LocalRouter(TopKRouter):
    """mcore's router without Transformer Engine, which mcore's own gating names even where it is not installed."""

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Return logits ``[..., experts]`` in the dtype that Hugging Face computes them in: float32 or the model's."""
        if self.config.moe_router_dtype == "fp32":
            return F.linear(input.float(), self.weight.float())
        return F.linear(input, self.weight)


class GroupLimitedRouter(LocalRouter):
    """DeepSeek's routing: the top-k experts within the best groups of experts.

    mcore (0.16.1) scores a group by the sum of its best topk / group_topk scores. DeepSeek-V2 (softmax) scores it by
    its best score, V3 (sigmoid) by the sum of its best two. V3's bias on the choice is a frozen base weight here;
    mcore's ``moe_router_enable_expert_bias`` would change it after every step.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.sigmoid = config.moe_router_score_function == "sigmoid"
        if self.sigmoid:
            self.expert_bias = torch.nn.Parameter(torch.empty(config.num_moe_experts, dtype=torch.float32))

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return float32 weights and bool choices, both ``[T, experts]``. ``padding_mask`` is not used."""
        logits = logits.view(-1, self.num_experts).float()
        scores = logits.sigmoid() if self.sigmoid else logits.softmax(dim=-1)
        chosen = self._in_best_groups(scores.detach()).topk(self.topk, dim=-1).indices
        weights = scores.gather(1, chosen)
        if self.sigmoid:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        weights = weights * self.config.moe_router_topk_scaling_factor
        choices = torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)
        return torch.zeros_like(scores).scatter(1, chosen, weights), choices

    def _in_best_groups(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores that experts are chosen by, ``[T, experts]``, minus infinity outside the best groups."""
        if self.sigmoid:
            scores = scores + self.expert_bias
        if not self.config.moe_router_num_groups:
            return scores
        grouped = scores.unflatten(-1, (self.config.moe_router_num_groups, -1))
        ranks = grouped.topk(2 if self.sigmoid else 1, dim=-1).values.sum(dim=-1)
        best = ranks.topk(self.config.moe_router_group_topk, dim=-1).indices
        excluded = torch.ones_like(ranks, dtype=torch.bool).scatter(-1, best, False)
        return grouped.masked_fill(excluded[..., None], -torch.inf).flatten(-2)


class SharedExpertGate(torch.nn.Module):
    """The linear that scales the shared experts' output per token. Every tensor-parallel rank holds the same weight."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.weight = torch.nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype))

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Map ``[..., H]`` to ``[..., 1]``. Returns (output, None), as mcore's linears return (output, bias)."""
        return F.linear(hidden, self.weight), None


class SharedExperts(SharedExpertMLP):
    """mcore's shared experts. The gate, where there is one, is a module, so that an adapter can wrap it."""

    def __init__(self, *args: Any, gate: bool, **kwargs: Any) -> None:
        super().__init__(*args, gate=False, **kwargs)
        self.gate = SharedExpertGate(self.config) if gate else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map ``[T, 1, H]`` to the same shape; under sequence parallelism T/TP tokens."""
        output = super().forward(hidden)
        return output if self.gate is None else output * self.gate(hidden)[0].sigmoid()


class PackedExperts(SequentialMLP):
    """mcore's experts, each an MLP of its own, computed together where that is possible.

    Attributes:
        compiles: True if the experts are compiled; set by ``megarl.model.step.compiled``.
    """

    compiles = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for linears in self._linears():
            place_together(linears)

    def forward(
        self, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Map the tokens of all local experts ``[T, H]``, sorted by expert, to the same shape; the bias is None.

        Args:
            permuted_local_hidden_states: the tokens.
            tokens_per_expert: int64 ``[experts]``.
            permuted_probs: routing weight of each token, ``[T]``.
        """
        tokens = permuted_local_hidden_states
        if self.tp_group.size() == 1 and wants_groups(tokens, self.config.ffn_hidden_size):
            together = self._together(tokens, tokens_per_expert, permuted_probs)
            if together is not None:
                return together, None
        if not self.compiles:
            return super().forward(tokens, tokens_per_expert, permuted_probs)
        counts = tokens_per_expert.tolist()
        parts = (torch.split(tensor, counts) for tensor in (tokens, permuted_probs))
        # torch.compile takes sizes of 0 and 1 for constants and would compile each, so those run uncompiled.
        outputs = [
            (expert if len(tokens) > 1 else expert._call_impl)(tokens, probs)[0]
            for expert, tokens, probs in zip(self.local_experts, *parts, strict=True)
        ]
        return torch.cat(outputs), None

    def _linears(self) -> tuple[list[torch.nn.Module], list[torch.nn.Module]]:
        """Return the first linear of each expert, and the second."""
        first, second = zip(*((expert.linear_fc1, expert.linear_fc2) for expert in self.local_experts), strict=True)
        return list(first), list(second)

    def _together(self, tokens: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor) -> torch.Tensor | None:
        """Return the output of all experts, or None if their linears cannot be computed together."""
        first, second = (GroupedLinear.of(linears) for linears in self._linears())
        if first is None or second is None:
            return None
        ends = counts.cumsum(0).to(tokens.device, torch.int32, non_blocking=True)
        hidden = weighted_swiglu(first(tokens, ends), probs)
        return second(hidden, ends)


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
