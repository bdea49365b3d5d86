# SPDX-License-Identifier: Apache-2.0
"""Play one episode: apply its limits, check what the environment returns, and give the reward."""

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megarl.environments.base import Environment
from megarl.environments.client import Client, EpisodeLimit
from megarl.errors import ConfigError, EpisodeError, MegarlError
from megarl.tasks.base import NOTHING, Reward
from megarl.tasks.rewards.verdicts import Verdicts
from megarl.types import ERROR, LIMITS, Completion, Prompt, Trajectory


@dataclass(frozen=True)
class Played:
    """An episode that has ended, or a completion with its reward.

    Attributes:
        trajectory: what it became.
        reward: of the trajectory, checked.
        texts: the decoded response of each sequence.
    """

    trajectory: Trajectory
    reward: Reward
    texts: list[str]


@dataclass(frozen=True)
class Player:
    """Plays the episodes of an environment.

    Attributes:
        environment: the environment.
        name: ``task.name``, for messages.
        verdicts: turns what the environment gives into rewards.
        zero_on_error: an error gives a reward of 0 (``task.reward_errors: zero``).
    """

    environment: Environment
    name: str
    verdicts: Verdicts
    zero_on_error: bool = False

    async def play(self, prompt: Prompt, client: Client) -> Played:
        """Play an episode.

        Raises:
            EpisodeError: the environment raised, or returned something other than a trajectory of this episode.
            RewardError: the reward is not a finite number.
            MegarlError: the engines failed.
        """
        try:
            trajectory = await self._rollout(prompt, client)
            reward = self._reward(trajectory, prompt, client)
        except (MegarlError, EpisodeLimit) as error:
            if client.failure is not None:
                raise client.failure from error
            if not self.zero_on_error or isinstance(error, ConfigError):
                raise
            trajectory, reward = replace(client.trajectory(), finish_reason=ERROR), self._nothing()
        # The reward may have been any object; this one goes to another process.
        trajectory = replace(trajectory, reward=reward.score, turns=client.turns)
        return Played(trajectory, reward, texts_of(trajectory, client))

    async def _rollout(self, prompt: Prompt, client: Client) -> Trajectory:
        """Return what the environment makes of the prompt, or of what was drawn before a limit."""
        said = f"environment '{self.name}', prompt '{prompt.id}'"
        try:
            async with asyncio.timeout(client.limits.seconds) as clock:
                result = await self.environment.rollout(prompt, client)
        except EpisodeLimit:
            return client.trajectory()
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            if isinstance(error, TimeoutError) and clock.expired():
                return replace(client.trajectory(), finish_reason="time")
            if client.failure is not None:
                raise client.failure from error
            if client.limit is not None:  # what a harness makes of it
                return client.trajectory()
            if isinstance(error, MegarlError):
                raise EpisodeError(f"{said}: {error}") from error
            raise EpisodeError(f"{said}: its rollout raised {type(error).__name__}: {error}") from error
        if client.failure is not None:
            raise client.failure
        if not isinstance(result, Trajectory):
            raise EpisodeError(
                f"{said}: its rollout returned {result!r} ({type(result).__name__}); return client.trajectory(reward)"
            )
        check(result, said)
        return result if client.limit is None else replace(result, finish_reason=client.limit)

    def _reward(self, trajectory: Trajectory, prompt: Prompt, client: Client) -> Reward:
        """Return the reward; 0 if a limit ended the episode and the environment gave none."""
        if not trajectory.reward and trajectory.is_truncated:
            return self._nothing()
        return self.verdicts.reward(trajectory.reward, prompt)

    def _nothing(self) -> Reward:
        """Return the reward of an episode that the environment gave none."""
        return replace(NOTHING, metrics=dict(getattr(self.environment, "unfinished_metrics", {})))


def texts_of(trajectory: Trajectory, client: Client) -> list[str]:
    """Return the text of each sequence after its prompt, with special tokens: they say who spoke."""
    return [client.decode(one.response_ids, special=True) for one in trajectory.sequences]


def check(trajectory: Trajectory, said: str) -> None:
    """Refuse a trajectory that cannot be trained on.

    Raises:
        EpisodeError: arrays of wrong shapes or dtypes, logprobs that are not finite, an unknown finish reason, or not
            one reward or advantage for each sequence or token.
    """
    if trajectory.finish_reason not in ("stop", *LIMITS):
        raise EpisodeError(
            f"{said}: finish_reason is '{trajectory.finish_reason}'; it must be stop, {', '.join(LIMITS)}"
        )
    for number, one in enumerate(trajectory.sequences):
        if problem := _problem(one):
            raise EpisodeError(f"{said}: sequence {number} of its trajectory: {problem}")
    count = len(trajectory.sequences)
    for name in ("rewards", "advantages"):
        given = getattr(trajectory, name)
        if given is not None and len(given) != count:
            raise EpisodeError(f"{said}: {name} has {len(given)} entries; give one for each of its {count} sequences")
    if trajectory.rewards is not None and not np.isfinite(np.asarray(trajectory.rewards, dtype=np.float64)).all():
        raise EpisodeError(f"{said}: rewards are {trajectory.rewards}; they must be finite")
    for number, values in enumerate(trajectory.advantages or ()):
        drawn = len(trajectory.sequences[number].logprobs)
        if np.shape(values) != (drawn,) or not np.isfinite(values).all():
            raise EpisodeError(
                f"{said}: the advantages of sequence {number} have shape {np.shape(values)}; give one finite number "
                f"for each of its {drawn} drawn tokens"
            )


def _problem(sequence: Any) -> str | None:
    """Return what is wrong with a sequence, or None."""
    if not isinstance(sequence, Completion):
        return f"it is {sequence!r}; use those of client.sequences()"
    for name in ("prompt_ids", "response_ids", "versions", "logprobs"):
        array, kind = getattr(sequence, name), np.floating if name == "logprobs" else np.integer
        if not isinstance(array, np.ndarray) or array.ndim != 1 or not np.issubdtype(array.dtype, kind):
            return f"{name} is {getattr(array, 'dtype', type(array))} {np.shape(array)}; it must be a vector of numbers"
    if not len(sequence.prompt_ids) or not len(sequence.logprobs):
        return "it has no prompt, or no token was drawn"
    if not np.isfinite(sequence.logprobs).all():
        return "logprobs holds a value that is not finite"
    return None
