# SPDX-License-Identifier: Apache-2.0
"""CISPO: clipped importance-sampling weights; every token keeps its gradient (MiniMax-M1, arXiv:2506.13585)."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from megarl.config import LossConfig
from megarl.loss.base import LossOutput, TokenBatch
from megarl.loss.policy import prepare


@dataclass(frozen=True)
class CispoLoss:
    """Per token ``-sg(clip(r, 1 - clip_low, 1 + clip_high)) A logprob`` (equations 4 and 5); sg stops the gradient.

    GRPO drops the gradient of a token whose ratio left the clip range; CISPO only bounds its weight. The paper has only
    an upper bound, and a wide one (``loss.clip_low`` = 1). TRL's ``epsilon_high`` is ``1 + clip_high`` here. Adds two
    metrics to the shared ones: ``clip_low`` and ``clip_high``, the fractions of tokens whose weight was bounded.
    """

    config: LossConfig
    zero_without_advantages: ClassVar[bool] = True

    def __call__(self, logprobs_T: torch.Tensor, tokens: TokenBatch) -> LossOutput:
        """Return this micro-batch's share of the loss. Raises what ``megarl.loss.policy.prepare`` raises."""
        policy = prepare(logprobs_T, tokens, self.config)
        low, high = 1.0 - self.config.clip_low, 1.0 + self.config.clip_high
        ratio_T = policy.ratio_T.detach()
        metrics = {"clip_low": policy.fraction_of(ratio_T < low), "clip_high": policy.fraction_of(ratio_T > high)}
        return policy.finish(-ratio_T.clamp(low, high) * tokens.advantages_T * logprobs_T, metrics)
