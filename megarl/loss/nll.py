# SPDX-License-Identifier: Apache-2.0
"""Negative log-likelihood: supervised fine-tuning on given responses."""

import torch

from megarl.loss.base import LossOutput, TokenBatch


class NllLoss:
    """Per token ``-logprob``; ignores advantages. Metric: ``nll``, its mean over the step's response tokens."""

    def __call__(self, logprobs_T: torch.Tensor, tokens: TokenBatch) -> LossOutput:
        """Return this micro-batch's share of the loss.

        Raises:
            LossInputError: shapes differ.
        """
        tokens.check(logprobs_T)
        loss = -(tokens.weights_T * logprobs_T).sum()
        return LossOutput(loss, {"nll": -(logprobs_T.detach() * tokens.token_fraction).sum()})
