# SPDX-License-Identifier: Apache-2.0
"""Define the input and output of a loss.

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
    """Per-token inputs of one micro-batch, aligned with the logprobs that a loss is called with.

    Attributes:
        weights_T: float32. The step's loss is the sum of ``weight * per-token loss`` over all its tokens, micro-batches
            and data-parallel ranks. The weights contain the denominators, which are computed over the whole step
            beforehand.
        advantages_T: float32.
        token_fraction: 1 / (response tokens of the whole step). A metric's mean is the sum of ``value *
            token_fraction`` over all micro-batches.
        sampler_logprobs_T: float32 or None.
        old_logprobs_T: float32 or None. If None, the loss uses the current logprobs, detached.
        reference_logprobs_T: float32 or None.
    """

    weights_T: torch.Tensor
    advantages_T: torch.Tensor
    token_fraction: float
    sampler_logprobs_T: torch.Tensor | None = None
    old_logprobs_T: torch.Tensor | None = None
    reference_logprobs_T: torch.Tensor | None = None

    def check(self, logprobs_T: torch.Tensor) -> None:
        """Raise ``LossInputError`` unless every tensor is ``[T]`` like ``logprobs_T``; nothing is broadcast."""
        for name in ("weights_T", "advantages_T", "sampler_logprobs_T", "old_logprobs_T", "reference_logprobs_T"):
            value = getattr(self, name)
            if value is not None and value.shape != logprobs_T.shape:
                raise LossInputError(
                    f"{name} has shape {tuple(value.shape)}, the logprobs {tuple(logprobs_T.shape)}; they must be equal"
                )


class LossOutput(NamedTuple):
    """The share of one micro-batch in the step's loss.

    Attributes:
        loss: scalar with gradient. The sum over all micro-batches is the step's loss.
        metrics: detached scalars. Over micro-batches, names ending in ``_max`` are combined by maximum, all others by
            sum.
    """

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]


class Loss(Protocol):
    """Per-token policy loss. Implementations hold only settings.

    A loss may have an attribute ``zero_without_advantages = True`` if its gradient is zero whenever all advantages are
    0 and ``loss.kl_coef`` is 0. The backward pass of such an update is then skipped.
    """

    def __call__(self, logprobs_T: torch.Tensor, tokens: TokenBatch) -> LossOutput:
        """Return this micro-batch's share of the loss. ``logprobs_T`` is float32 with gradient."""
        ...


# Type of the entries of ``LOSSES`` (``megarl/loss/__init__.py``): name in ``loss.name`` -> factory.
LossFactory = Callable[[LossConfig], Loss]
