# SPDX-License-Identifier: Apache-2.0
"""Choose the experts of each token: mcore's router without Transformer Engine, and DeepSeek's."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router import TopKRouter


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
