# SPDX-License-Identifier: Apache-2.0
"""What every loss receives and returns, and the registry.

Shape letter: T response tokens of one micro-batch, sequence after sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from megarl.config import LossConfig
from megarl.errors import LossInputError


@dataclass(frozen=True)
class TokenBatch:
    """Per-token inputs of one micro-batch, aligned with the logprobs a loss is called with.

    Attributes:
        weights_T: float32. The step's loss is the sum over all its tokens, micro-batches and data-parallel ranks of
            ``weight * per-token loss``: the denominators are in here, reduced over the whole step beforehand.
        advantages_T: float32.
        token_fraction: 1 / (response tokens of the whole step); a metric's mean is the sum of ``value *
            token_fraction`` over all micro-batches.
        sampler_logprobs_T: float32 or None.
        old_logprobs_T: float32 or None (then the loss uses the current ones, detached).
        reference_logprobs_T: float32 or None.
    """

    weights_T: torch.Tensor
    advantages_T: torch.Tensor
    token_fraction: float
    sampler_logprobs_T: torch.Tensor | None = None
    old_logprobs_T: torch.Tensor | None = None
    reference_logprobs_T: torch.Tensor | None = None

    def check(self, logprobs_T: torch.Tensor) -> None:
        """Raise ``LossInputError`` unless every tensor is ``[T]`` like ``logprobs_T``: nothing is broadcast."""
        for name in ("weights_T", "advantages_T", "sampler_logprobs_T", "old_logprobs_T", "reference_logprobs_T"):
            value = getattr(self, name)
            if value is not None and value.shape != logprobs_T.shape:
                raise LossInputError(
                    f"{name} has shape {tuple(value.shape)}, the logprobs {tuple(logprobs_T.shape)}; they must be equal"
                )


class LossOutput(NamedTuple):
    """A loss's share of one micro-batch.

    Attributes:
        loss: scalar with gradient; shares add up to the step's loss.
        metrics: detached scalars. Names ending in ``_max`` combine over micro-batches by maximum, all others by sum.
    """

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]


class Loss(Protocol):
    """Per-token policy loss; implementations hold only settings.

    A loss whose gradient is zero where all advantages are 0 and ``loss.kl_coef`` is 0 may have an attribute
    ``zero_without_advantages = True``: the backward pass of such an update is then skipped.
    """

    def __call__(self, logprobs_T: torch.Tensor, tokens: TokenBatch) -> LossOutput:
        """Return this micro-batch's share of the loss; ``logprobs_T`` is float32 with gradient."""
        ...


# Name in ``loss.name`` -> factory. Each loss lives in its own module, which adds itself in ``megarl/loss/__init__.py``.
LossFactory = Callable[[LossConfig], Loss]
