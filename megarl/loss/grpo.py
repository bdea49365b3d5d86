# SPDX-License-Identifier: Apache-2.0
"""GRPO: the clipped surrogate of PPO with group advantages (DeepSeekMath, arXiv:2402.03300, equation 3)."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from megarl.config import LossConfig
from megarl.loss.base import LossOutput, TokenBatch
from megarl.loss.policy import prepare


@dataclass(frozen=True)
class GrpoLoss:
    """Per token ``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`` with r = exp(logprob - old logprob).

    With ``clip_high`` above ``clip_low`` this is DAPO's clip-higher (arXiv:2503.14476). On policy (no old logprobs) r
    is 1 and the gradient is that of ``-A * logprob``. Adds two metrics to the shared ones: ``clip_low`` and
    ``clip_high``, the fractions of tokens whose gradient is cut at either bound.
    """

    config: LossConfig
    zero_without_advantages: ClassVar[bool] = True

    def __call__(self, logprobs_T: torch.Tensor, tokens: TokenBatch) -> LossOutput:
        """Return this micro-batch's share of the loss. Raises what ``megarl.loss.policy.prepare`` raises."""
        policy = prepare(logprobs_T, tokens, self.config)
        low, high = 1.0 - self.config.clip_low, 1.0 + self.config.clip_high
        ratio_T, advantages_T = policy.ratio_T, tokens.advantages_T
        gain_T = torch.minimum(ratio_T * advantages_T, ratio_T.clamp(low, high) * advantages_T)
        metrics = {
            "clip_low": policy.fraction_of((ratio_T < low) & (advantages_T < 0)),
            "clip_high": policy.fraction_of((ratio_T > high) & (advantages_T > 0)),
        }
        return policy.finish(-gain_T, metrics)
