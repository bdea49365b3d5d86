# SPDX-License-Identifier: Apache-2.0
"""Define the input and output of a loss.

Shape letters: T response tokens of one micro-batch on this rank, sequence after sequence; S sequences of it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from megarl.config import LossConfig
from megarl.errors import LossInputError
from megarl.loss.sequences import PerToken, Sequences, SequenceSum


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
        sequences: the sequence of each token. A sequence lies in one micro-batch; a prompt's group may be spread over
            several. Under context parallelism every rank has a part of each sequence's tokens, maybe none (T = 0): the
            methods below reduce over the ranks, so every rank must call them alike.
    """

    weights_T: torch.Tensor
    advantages_T: torch.Tensor
    token_fraction: float
    sampler_logprobs_T: torch.Tensor | None = None
    old_logprobs_T: torch.Tensor | None = None
    reference_logprobs_T: torch.Tensor | None = None
    sequences: Sequences | None = None

    @property
    def sequence_ids_T(self) -> torch.Tensor:
        """Int64 index of each token's sequence in the micro-batch, 0 to S - 1."""
        return self._sequences.ids_T

    @property
    def group_ids_T(self) -> torch.Tensor:
        """Int64 index of each token's prompt in the step (``Sample.group``)."""
        return self._sequences.group_ids_T

    @property
    def num_sequences(self) -> int:
        """S, which counts sequences without response tokens too."""
        return len(self._sequences.counts_S)

    def sequence_sum(self, values_T: torch.Tensor) -> torch.Tensor:
        """Sum ``[T]`` values over each sequence, over all context-parallel ranks; with gradient.

        Returns:
            ``[S]``, the same on every context-parallel rank. Ranks add up their losses: bring it back to tokens by
            ``per_token`` before the sum with ``weights_T``, or it counts once for every rank.
        """
        return SequenceSum.apply(values_T, self._sequences)

    def sequence_mean(self, values_T: torch.Tensor) -> torch.Tensor:
        """Average ``[T]`` values over each sequence's response tokens, as ``sequence_sum``; 0 where there are none."""
        return self.sequence_sum(values_T) / self._sequences.lengths.clamp(min=1)

    def per_token(self, values_S: torch.Tensor) -> torch.Tensor:
        """Give each token its sequence's value: ``[S]`` -> ``[T]``, with gradient."""
        return PerToken.apply(values_S, self._sequences)

    @property
    def is_empty(self) -> bool:
        """True if no context-parallel rank has a response token of the micro-batch."""
        return not self._sequences.lengths_S.any()

    def over_context(self, group: dist.ProcessGroup) -> "TokenBatch":
        """Return the same tokens as one rank's part of those that a context-parallel group shares."""
        return replace(self, sequences=replace(self._sequences, group=group))

    @property
    def _sequences(self) -> Sequences:
        if self.sequences is None:
            raise LossInputError("sequences is missing; use the TokenBatch of a packed batch, or give it")
        return self.sequences

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

    A loss may have an attribute ``zero_without_advantages = True`` if, with a ``loss.kl_coef`` of 0, a sequence whose
    advantages are all 0 adds nothing to the gradient and does not change what the others add. Such sequences then skip
    the backward pass: the loss is called with them and with the others in different micro-batches.
    """

    def __call__(self, logprobs_T: torch.Tensor, tokens: TokenBatch) -> LossOutput:
        """Return this micro-batch's share of the loss. ``logprobs_T`` is float32 with gradient."""
        ...


# Type of the entries of ``LOSSES`` (``megarl/loss/__init__.py``): name in ``loss.name`` -> factory.
LossFactory = Callable[[LossConfig], Loss]
