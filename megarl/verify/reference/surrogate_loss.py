# SPDX-License-Identifier: Apache-2.0
"""Define the loss that both sides are verified with."""

import torch

from megarl.loss.base import LossOutput, TokenBatch


class SurrogateLoss:
    """-weight * advantage * logprob, the reference's loss. On policy it has GRPO's gradient."""

    def __call__(self, logprobs_T: torch.Tensor, tokens: TokenBatch) -> LossOutput:
        """Sum the loss over the tokens of a micro-batch."""
        tokens.check(logprobs_T)
        loss = -(tokens.weights_T * tokens.advantages_T * logprobs_T).sum()
        return LossOutput(loss, {"loss": loss.detach(), "logprob_max": logprobs_T.detach().max()})
