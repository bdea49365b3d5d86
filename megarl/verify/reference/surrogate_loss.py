# SPDX-License-Identifier: Apache-2.0
"""The loss that is verified with."""

import torch

from megarl.loss.base import LossOutput, TokenBatch


class SurrogateLoss:
    """-weight * advantage * logprob: the reference's loss, which is also GRPO's gradient on policy."""

    def __call__(self, logprobs_T: torch.Tensor, tokens: TokenBatch) -> LossOutput:
        """Sum over the tokens of a micro-batch."""
        tokens.check(logprobs_T)
        loss = -(tokens.weights_T * tokens.advantages_T * logprobs_T).sum()
        return LossOutput(loss, {"loss": loss.detach(), "logprob_max": logprobs_T.detach().max()})
