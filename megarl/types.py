# SPDX-License-Identifier: Apache-2.0
"""Define the frozen records that travel between packages. Arrays are NumPy, not torch, so that tasks stay light.

Shape letters: P prompt tokens, R response tokens, L = P + R tokens of a sequence.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megarl.errors import DataError

# Largest reward, and largest metric of a reward. Twice this, the widest spread in a group, still fits float32 (the
# dtype of advantages), and sums of squares of such rewards fit float64.
LARGEST_REWARD = 1e38


@dataclass(frozen=True)
class Prompt:
    """One question of a task.

    Attributes:
        id: identifier, stable within the task's data set (``"train-17"``); appears in logs and rollouts.
        messages: chat messages ``{"role": ..., "content": ...}`` that the chat template renders.
        data: values that the reward needs (the answer, the allowed numbers, ...); never shown to the model.
    """

    id: str
    messages: tuple[Mapping[str, str], ...]
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """One completion that the sampler returned for a prompt, token by token.

    Attributes:
        prompt_ids: exactly the ids that were sent, int64 ``[P]``.
        response_ids: exactly the ids that were drawn, the stop token included, int64 ``[R]``.
        logprobs: log-probability of each drawn token under the distribution that it was drawn from (temperature
            applied), float32 ``[R]``.
        versions: policy version that made each token, int64 ``[R]``.
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
class DecodedCompletion:
    """One completion as a reward sees it.

    Attributes:
        text: the decoded response, without special tokens.
        finish_reason: ``"stop"`` or ``"length"`` (it reached ``sampler.max_response_tokens``).
        response_ids: the tokens that were drawn, the stop token included, int64 ``[R]``.
    """

    text: str
    finish_reason: str
    response_ids: np.ndarray


@dataclass(frozen=True)
class Sample:
    """One training sequence: its tokens, which of them the policy chose, and per-token inputs of the loss.

    Attributes:
        tokens: ``[L]`` int64.
        response_mask: True where the policy chose the token, bool ``[L]``. ``response_mask[0]`` is False, because
            nothing predicts the first token. R = ``response_mask.sum()``.
        advantage: one advantage for the whole sequence, or one per response token, float32 ``[R]``.
        sampler_logprobs: logprobs from the sampler, float32 ``[R]``, or None.
        old_logprobs: the trainer's logprobs at the start of the step, float32 ``[R]``, or None. With None the loss uses
            the current logprobs, detached (exact for a single on-policy update).
        reference_logprobs: logprobs of the reference policy, float32 ``[R]``, or None.
        group: index of the sample's prompt in the step, or None. Samples of one prompt share it.
    """

    tokens: np.ndarray
    response_mask: np.ndarray
    advantage: float | np.ndarray = 0.0
    sampler_logprobs: np.ndarray | None = None
    old_logprobs: np.ndarray | None = None
    reference_logprobs: np.ndarray | None = None
    group: int | None = None

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
        shape = np.shape(self.advantage)
        if shape not in ((), (count,)):
            raise DataError(
                f"sample.advantage has shape {shape}, but response_mask marks {count} tokens; give one number, or one "
                "for each marked token"
            )
        if not np.isfinite(self.advantage).all():
            raise DataError(f"sample.advantage is {self.advantage}; it must be finite")

    @property
    def has_signal(self) -> bool:
        """True if any token's advantage is not 0."""
        return bool(np.any(self.advantage))
