# SPDX-License-Identifier: Apache-2.0
"""Draw the turns of one episode, within its limits, and keep every drawn token with its logprob and version."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megarl.environments.record import Call, sequences_of
from megarl.errors import EpisodeError
from megarl.types import Completion, Trajectory

# Draws one turn: token ids ``[P]``, number of the turn, most tokens -> the completion.
Draw = Callable[[np.ndarray, int, int], Awaitable[Completion]]


class EpisodeLimit(Exception):
    """The episode has reached a limit, so no further turn is drawn.

    An environment may catch it, to return a trajectory with a reward. If it does not, the reward is 0. Either way the
    trajectory ends with ``reason``.

    Attributes:
        reason: ``"turns"`` or ``"length"``.
    """

    def __init__(self, reason: str, said: str) -> None:
        super().__init__(said)
        self.reason = reason


@dataclass(frozen=True)
class Limits:
    """Limits of an episode.

    Attributes:
        turns: most turns (``task.max_turns``).
        tokens: most tokens after the prompt, those of tools and users included (``sampler.max_response_tokens``).
        turn_tokens: most tokens of a turn (``task.max_turn_tokens``).
        seconds: wall-clock limit (``task.episode_seconds``).
    """

    turns: int
    tokens: int
    turn_tokens: int
    seconds: float


@dataclass(frozen=True)
class Turn:
    """The policy's words between two of others.

    Attributes:
        text: decoded, without special tokens, up to a stop string.
        ids: the drawn tokens, the stop token or the tokens of a stop string included, int64 ``[R]``.
        logprobs: of each, float32 ``[R]``.
        versions: policy version that drew each, int64 ``[R]``.
        finish_reason: ``"stop"`` or ``"length"``.
    """

    text: str
    ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: str


@dataclass
class Client:
    """The policy, as one episode sees it.

    Attributes:
        prompt_ids: the rendered prompt, with the header of the assistant's turn, int64 ``[P]``.
        tokenizer: the model's tokenizer.
        limits: of the episode.
        draw: draws a turn.
        template: variables of the chat template (``task.chat_template_kwargs``).
        limit: the limit that ended the episode, or None.
        failure: why the engines could not draw a turn, or None.
    """

    prompt_ids: np.ndarray
    tokenizer: Any
    limits: Limits
    draw: Draw
    template: Mapping[str, Any] = field(default_factory=dict)
    limit: str | None = None
    failure: Exception | None = None
    _calls: list[Call] = field(default_factory=list)

    @property
    def turns(self) -> int:
        """Number of turns that have been asked for, without those that were given up."""
        return sum(not call.given_up for call in self._calls)

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of a text, without special tokens around it, int64."""
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False), dtype=np.int64)

    def decode(self, ids: Sequence[int] | np.ndarray, *, special: bool = False) -> str:
        """Return the text of token ids.

        Args:
            ids: the tokens.
            special: also show special tokens.
        """
        return self.tokenizer.decode(np.asarray(ids), skip_special_tokens=not special)

    async def sample(
        self, ids: Sequence[int] | np.ndarray, max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Turn:
        """Draw a turn.

        Calls may overlap. What is sent and drawn becomes a part of the trajectory: ids that begin with an earlier
        sequence, its drawn tokens included, extend that sequence; others begin a new one.

        Args:
            ids: everything that the policy is to see, ``[P]``.
            max_tokens: most tokens of the turn, if less than the limits allow.
            stop: texts that end the turn, see ``until_stop``.

        Raises:
            EpisodeLimit: no turn or no token is left.
            EpisodeError: ``ids`` are not token ids.
            MegarlError: the engines failed; the run ends, whatever the environment makes of it.
        """
        sent = token_ids(ids)
        left = len(self.prompt_ids) + self.limits.tokens - len(sent)
        if self.turns >= self.limits.turns:
            raise self._ended("turns", f"the episode has had task.max_turns ({self.limits.turns})")
        if left < 1:
            raise self._ended("length", f"the episode has sampler.max_response_tokens ({self.limits.tokens})")
        call = Call(sent)
        self._calls.append(call)
        most = min(left, self.limits.turn_tokens, max_tokens or left)
        try:
            whole = await self.draw(sent, len(self._calls) - 1, most)
        except asyncio.CancelledError:
            call.given_up = True
            raise
        except Exception as error:
            self.failure = error
            raise
        drawn, text = until_stop(whole, stop, self.decode)
        call.drawn = drawn
        return Turn(text, drawn.response_ids, drawn.logprobs, drawn.versions, drawn.finish_reason)

    def sequences(self) -> tuple[Completion, ...]:
        """Return the sequences drawn so far, in the order in which they were begun."""
        return sequences_of(self._calls)

    def trajectory(
        self,
        reward: Any = 0.0,
        *,
        rewards: Sequence[float] | None = None,
        advantages: Sequence[np.ndarray] | None = None,
    ) -> Trajectory:
        """Return all that was drawn, with its reward.

        Args:
            reward: see ``Trajectory.reward``.
            rewards: a reward for each of ``sequences()``.
            advantages: of each of ``sequences()``, one for each token that was drawn.
        """
        sequences = self.sequences()
        cut = bool(sequences) and sequences[-1].finish_reason == "length"
        return Trajectory(
            sequences,
            self.limit or ("length" if cut else "stop"),
            reward,
            None if rewards is None else tuple(rewards),
            None if advantages is None else tuple(np.asarray(each, dtype=np.float32) for each in advantages),
        )

    def _ended(self, reason: str, said: str) -> EpisodeLimit:
        self.limit = reason
        return EpisodeLimit(reason, said)


def until_stop(drawn: Completion, stop: Sequence[str], decode: Callable[[np.ndarray], str]) -> tuple[Completion, str]:
    """End a turn where its text first holds a stop string.

    The turn is cut after the token that completes the string, where vLLM ends a completion with ``stop``. Up to there
    each token was drawn as if sampling had ended there, so its logprob holds; the tokens after it are forgotten.

    Args:
        drawn: of one turn.
        stop: texts without special tokens; none leaves the turn as it is.
        decode: gives the text of ids.

    Returns:
        What is recorded, with the tokens of the stop string; and its text up to the stop string.
    """

    def stops(text: str) -> bool:
        return any(one in text for one in stop)

    ids = drawn.response_ids
    text = decode(ids)
    if not stops(text):
        return drawn, text
    none, count = 0, len(ids)  # the first `none` tokens hold no stop string, the first `count` hold one
    while count - none > 1:
        middle = (none + count) // 2
        none, count = (none, middle) if stops(decode(ids[:middle])) else (middle, count)
    text = decode(ids[:count])
    cut = replace(
        drawn,
        response_ids=ids[:count],
        logprobs=drawn.logprobs[:count],
        versions=drawn.versions[:count],
        finish_reason="stop",
    )
    return cut, text[: min(text.index(one) for one in stop if one in text)]


def token_ids(ids: Any) -> np.ndarray:
    """Return ids as int64 ``[P]``.

    Raises:
        EpisodeError: they are not a list of integers, or there are none.
    """
    array = np.asarray(ids)
    if array.ndim != 1 or not array.size or not np.issubdtype(array.dtype, np.integer):
        raise EpisodeError(
            f"client.sample was given {array.dtype} {array.shape}; give the token ids as integers [P], P > 0"
        )
    return array.astype(np.int64)
