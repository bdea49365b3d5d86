# SPDX-License-Identifier: Apache-2.0
"""Frozen records that travel between the parts. No torch here: arrays are NumPy, so that tasks stay light.

Shape letters: P prompt tokens, R response tokens, L = P + R tokens of a sequence.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megarl.errors import DataError

# The largest reward, and metric of one. Twice this, the widest a group can spread, is still a float32, as
# advantages are, and sums of squares of such rewards are still float64.
LARGEST_REWARD = 1e38


@dataclass(frozen=True)
class Prompt:
    """One question a task asks.

    Attributes:
        id: stable within the task's data set (``"train-17"``); appears in logs and rollouts.
        messages: chat messages ``{"role": ..., "content": ...}`` that the chat template renders.
        data: what the reward needs (the answer, the numbers allowed, ...); never shown to the model.
    """

    id: str
    messages: tuple[Mapping[str, str], ...]
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """What the sampler returned for one prompt, token by token.

    Attributes:
        prompt_ids: ``[P]`` int64, exactly the ids that were sent.
        response_ids: ``[R]`` int64, exactly the ids that were drawn (the stop token included).
        logprobs: ``[R]`` float32, log-probability of each drawn token under the distribution it was drawn from
            (temperature applied).
        versions: ``[R]`` int64, the policy version that made each token.
        finish_reason: ``"stop"`` or ``"length"``.
    """

    prompt_ids: np.ndarray
    response_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: str

    def __post_init__(self) -> None:
        lengths = {len(self.response_ids), len(self.logprobs), len(self.versions)}
        if len(lengths) != 1:
            raise DataError(
                f"completion arrays disagree: response_ids has {len(self.response_ids)} tokens, logprobs "
                f"{len(self.logprobs)}, versions {len(self.versions)}; they must be equal"
            )


@dataclass(frozen=True)
class Sample:
    """One training sequence: tokens, which of them the policy chose, and what is known of each.

    Attributes:
        tokens: ``[L]`` int64.
        response_mask: ``[L]`` bool, True where the policy chose the token. ``response_mask[0]`` is False (the first
            token has no prediction). R = ``response_mask.sum()``.
        advantage: scalar advantage of the sequence.
        sampler_logprobs: ``[R]`` float32, from the sampler.
        old_logprobs: ``[R]`` float32 or None, the trainer's own at the start of the step. None means that the loss
            uses the current logprobs, detached (exact for a single on-policy update).
        reference_logprobs: ``[R]`` float32 or None, with the adapter disabled.
    """

    tokens: np.ndarray
    response_mask: np.ndarray
    advantage: float = 0.0
    sampler_logprobs: np.ndarray | None = None
    old_logprobs: np.ndarray | None = None
    reference_logprobs: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.tokens.ndim != 1 or len(self.tokens) < 2:
            raise DataError(f"sample.tokens must be one-dimensional with at least 2 tokens, got {self.tokens.shape}")
        if self.response_mask.shape != self.tokens.shape:
            raise DataError(
                f"sample.response_mask has shape {self.response_mask.shape}, tokens {self.tokens.shape}; "
                "they must be equal"
            )
        if self.response_mask[0]:
            raise DataError("sample.response_mask[0] is True, but nothing predicts the first token")
        count = int(self.response_mask.sum())
        for name in ("sampler_logprobs", "old_logprobs", "reference_logprobs"):
            value = getattr(self, name)
            if value is not None and value.shape != (count,):
                raise DataError(
                    f"sample.{name} has shape {value.shape}, but response_mask marks {count} tokens; "
                    "give one value for each marked token"
                )
            if value is not None and not np.isfinite(value).all():
                raise DataError(f"sample.{name} holds a value that is not finite")
        if not np.isfinite(self.advantage):
            raise DataError(f"sample.advantage is {self.advantage}; it must be finite")
