# SPDX-License-Identifier: Apache-2.0
"""Define the frozen records that travel between packages. Arrays are NumPy, not torch, so that tasks stay light.

Shape letters: P prompt tokens, N tokens after them, R of these that the policy drew, L = P + N tokens of a sequence. In
a completion of one turn R = N.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megarl.errors import DataError

# Largest reward, and largest metric of a reward. Twice this, the widest spread in a group, still fits float32 (the
# dtype of advantages), and sums of squares of such rewards fit float64.
LARGEST_REWARD = 1e38
# Finish reasons of a trajectory that a limit ended.
LIMITS = ("length", "turns", "time")
# Finish reason of an episode in which the environment raised.
ERROR = "error"


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
    """One token sequence: what the sampler returned for a prompt, or the turns of an episode one after the other.

    Attributes:
        prompt_ids: exactly the ids that were sent, int64 ``[P]``.
        response_ids: exactly the ids that were drawn, the stop token included, int64 ``[N]``. In an episode also those
            that tools or users said between the turns.
        logprobs: log-probability of each drawn token under the distribution that it was drawn from (temperature
            applied), float32 ``[R]``.
        versions: policy version that made each drawn token, int64 ``[R]``.
        finish_reason: ``"stop"`` or ``"length"``; of the last turn.
        drawn: True where the policy drew the token, bool ``[N]``; None: it drew all of them.
    """

    prompt_ids: np.ndarray
    response_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: str
    drawn: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.drawn is not None and (self.drawn.dtype != bool or self.drawn.shape != self.response_ids.shape):
            raise DataError(
                f"completion.drawn is {self.drawn.dtype} {self.drawn.shape}; it must be bool of the shape of "
                f"response_ids, {self.response_ids.shape}"
            )
        count = len(self.response_ids) if self.drawn is None else int(self.drawn.sum())
        if {len(self.logprobs), len(self.versions)} != {count}:
            raise DataError(
                f"completion arrays disagree: response_ids has {count} drawn tokens, logprobs "
                f"{len(self.logprobs)}, versions {len(self.versions)}; they must be equal"
            )

    @property
    def mask(self) -> np.ndarray:
        """True where the policy drew the token, bool ``[P + N]``."""
        drawn = np.ones(len(self.response_ids), dtype=bool) if self.drawn is None else self.drawn
        return np.concatenate([np.zeros(len(self.prompt_ids), dtype=bool), drawn])


@dataclass(frozen=True)
class Trajectory:
    """One sample of a prompt: the token sequences that it is trained on, how it ended, and what it earned.

    A completion of one turn is a trajectory of one sequence. An episode may branch into several.

    Attributes:
        sequences: the token sequences; none if the episode ended before a token was drawn.
        finish_reason: ``"stop"``, or the limit that ended it: ``"length"`` (tokens), ``"turns"``, ``"time"``; or
            ``"error"``: the environment raised.
        reward: of the whole trajectory: a number, a ``megarl.tasks.Reward``, or a mapping of the components that
            ``task.reward_weights`` weighs.
        rewards: a reward for each sequence, which its advantage is made of; None: all share ``reward``.
        advantages: per-token advantages of each sequence, float ``[R]``, used as they are; None: made of the rewards.
        turns: number of turns of an episode; None for a completion of one turn.
    """

    sequences: tuple[Completion, ...]
    finish_reason: str = "stop"
    reward: Any = 0.0
    rewards: tuple[float, ...] | None = None
    advantages: tuple[np.ndarray, ...] | None = None
    turns: int | None = None

    @property
    def is_truncated(self) -> bool:
        """True if a limit ended it."""
        return self.finish_reason in LIMITS

    @property
    def drawn_tokens(self) -> int:
        """Number of tokens that the policy drew."""
        return sum(len(one.logprobs) for one in self.sequences)

    @property
    def versions(self) -> np.ndarray:
        """Policy version of each drawn token, sequence after sequence, int64."""
        return np.concatenate([np.zeros(0, dtype=np.int64), *(one.versions for one in self.sequences)])

    def units(self) -> list["Trajectory"]:
        """Return the parts that have an advantage each: the whole, or every sequence if it has its own reward."""
        if self.rewards is None:
            return [self]
        return [
            Trajectory((one,), self.finish_reason, reward)
            for one, reward in zip(self.sequences, self.rewards, strict=True)
        ]


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
