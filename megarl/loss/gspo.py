# SPDX-License-Identifier: Apache-2.0
"""GSPO: one clipped importance ratio per sequence, normalised by its length (arXiv:2507.18071, section 4)."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from megarl.config import LossConfig
from megarl.loss.base import LossOutput, TokenBatch
from megarl.loss.correction import largest
from megarl.loss.policy import prepare


@dataclass(frozen=True)
class GspoLoss:
    """Per token ``-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)``, s the geometric mean of a sequence's ratios.

    s = exp(mean over the sequence of (logprob - old logprob)), equation 7, with its gradient. The paper weighs all
    sequences the same (``loss.aggregation: sequence_mean``), and s hardly leaves 1: it clips at 3e-4 and 4e-4 (section
    5.1). All tokens of a sequence share s, so per-token advantages act by their average.

    Metrics beside the shared ones: ``clip_low`` and ``clip_high``, the fractions of tokens whose gradient is cut at
    either bound; ``sequence_ratio_max``, the largest s.
    """

    config: LossConfig
    zero_without_advantages: ClassVar[bool] = True

    def __call__(self, logprobs_T: torch.Tensor, tokens: TokenBatch) -> LossOutput:
        """Return this micro-batch's share of the loss; see ``megarl.loss.policy.prepare`` for what is raised."""
        policy = prepare(logprobs_T, tokens, self.config)
        low, high = 1.0 - self.config.clip_low, 1.0 + self.config.clip_high
        ratio_T = tokens.per_token(tokens.sequence_mean(logprobs_T - policy.old_T)).exp()
        advantages_T = tokens.advantages_T
        gain_T = torch.minimum(ratio_T * advantages_T, ratio_T.clamp(low, high) * advantages_T)
        metrics = {
            "clip_low": policy.fraction_of((ratio_T < low) & (advantages_T < 0)),
            "clip_high": policy.fraction_of((ratio_T > high) & (advantages_T > 0)),
            "sequence_ratio_max": largest(ratio_T.detach()),
        }
        return policy.finish(-gain_T, metrics)
