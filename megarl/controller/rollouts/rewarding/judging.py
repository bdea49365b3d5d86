# SPDX-License-Identifier: Apache-2.0
"""Turn what was sampled into a scored rollout: checks, rewards, advantages."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megarl.config import RunConfig
from megarl.controller.rollouts.data import EncodedPrompt
from megarl.controller.rollouts.rewarding.length_penalty import trained_scores
from megarl.controller.rollouts.rewarding.scoring import Group
from megarl.controller.rollouts.rollout import Rollout, SequenceAdvantages
from megarl.environments.episode import Played
from megarl.errors import DataError, LossInputError
from megarl.loss.advantages import Advantages, build_advantages
from megarl.tasks.base import Reward
from megarl.types import ERROR, Completion, DecodedCompletion, Trajectory

Decode = Callable[[np.ndarray], str]


@dataclass(frozen=True)
class Rules:
    """The way from rewards to advantages.

    Attributes:
        advantages_of: function: scores ``[G]`` -> advantages, one entry for each: a number, or ``[R]``.
        scores_of: function: rewards ``[G]`` and the trajectories -> the scores that advantages are made of ``[G]``.
        mask_truncated: see ``Rollout``.
    """

    advantages_of: Callable[[np.ndarray], Advantages] = np.zeros_like
    scores_of: Callable[[np.ndarray, Sequence[Trajectory]], np.ndarray] = lambda scores, _: scores
    mask_truncated: bool = False


def rules_of(config: RunConfig) -> Rules:
    """Return the rules of a run's training."""
    loss, most = config.loss, config.sampler.max_response_tokens
    return Rules(
        build_advantages(loss),
        lambda scores, each: trained_scores(scores, each, loss, most),
        mask_truncated=loss.truncated == "mask",
    )


def score(
    prompts: Sequence[EncodedPrompt],
    completions: Sequence[Sequence[Completion]],
    rewards_of: Callable[[Sequence[Group]], list[Reward]],
    decode: Decode,
    rules: Rules,
    *,
    group: int,
    version: int | None,
) -> Rollout:
    """Check and score completions of one turn.

    Args:
        prompts: as sent.
        completions: as returned, per prompt.
        rewards_of: function: prompts, each with its completions -> the rewards of all completions in order, such as
            ``RewardProcess.score``.
        decode: function: response ids -> text without special tokens.
        rules: what the advantages are made of.
        group: number of completions expected per prompt.
        version: the policy version that must have sampled every token; None for any.

    Raises:
        DataError: a wrong number of completions, prompt tokens other than those sent, an empty response, or a token
            sampled by another version.
        RewardError: as ``rewards_of`` raised it.
    """
    for prompt, answers in zip(prompts, completions, strict=True):
        check_group(prompt, answers, group, version)
    texts = [[decode(answer.response_ids) for answer in answers] for answers in completions]
    flat = rewards_of(
        [
            (prompt.prompt, [decoded(text, answer) for text, answer in zip(group_texts, answers, strict=True)])
            for prompt, group_texts, answers in zip(prompts, texts, completions, strict=True)
        ]
    )
    rewards = [flat[start : start + group] for start in range(0, len(flat), group)]
    played = [
        [
            Played(Trajectory((answer,), ERROR if reward.failed else answer.finish_reason), reward, [text])
            for answer, text, reward in zip(*each, strict=True)
        ]
        for each in zip(completions, texts, rewards, strict=True)
    ]
    return judge(prompts, played, rules, version=version)


def judge(
    prompts: Sequence[EncodedPrompt], played: Sequence[Sequence[Played]], rules: Rules, *, version: int | None
) -> Rollout:
    """Compute the advantages of trajectories that have their rewards.

    Args:
        prompts: P.
        played: of each prompt, ``[P][G]``.
        rules: what the advantages are made of.
        version: the policy version that must have sampled every token; None for any.

    Raises:
        DataError: a token was sampled by another version.
    """
    scores: list[np.ndarray] = []
    advantages: list[list[SequenceAdvantages]] = []
    for prompt, group in zip(prompts, played, strict=True):
        for one in group:
            check_version(prompt, one.trajectory.versions, version)
        units = [unit for one in group for unit in one.trajectory.units()]
        given = [reward for one in group for reward in one.trajectory.rewards or [one.reward.score]]
        scores.append(rules.scores_of(np.array(given, dtype=np.float64), units) if units else np.zeros(0))
        of_units = iter(rules.advantages_of(scores[-1])) if units else iter(())
        advantages.append([sequence_advantages(one.trajectory, of_units) for one in group])
    return Rollout(
        list(prompts),
        [[one.trajectory for one in group] for group in played],
        [[one.texts for one in group] for group in played],
        [[one.reward for one in group] for group in played],
        advantages,
        scores,
        rules.mask_truncated,
    )


def sequence_advantages(trajectory: Trajectory, of_units: Iterator[float | np.ndarray]) -> SequenceAdvantages:
    """Return the advantage of each sequence of a trajectory, from those of its units, which come next."""
    found: list[float | np.ndarray] = []
    for unit in trajectory.units():
        value = next(of_units)
        if not unit.sequences or not isinstance(value, np.ndarray) or not value.ndim:
            found += [value] * len(unit.sequences)
        elif len(value) == unit.drawn_tokens:
            found += np.split(np.asarray(value), np.cumsum([len(one.logprobs) for one in unit.sequences])[:-1])
        else:
            raise LossInputError(
                f"loss.advantage returned {len(value)} advantages for a trajectory with {unit.drawn_tokens} drawn "
                "tokens; return one number, or one for each"
            )
    return found if trajectory.advantages is None else list(trajectory.advantages)


def decoded(text: str, completion: Completion) -> DecodedCompletion:
    """Return what a reward sees of a completion."""
    return DecodedCompletion(text, completion.finish_reason, np.asarray(completion.response_ids, dtype=np.int64))


def check_group(prompt: EncodedPrompt, answers: Sequence[Completion], group: int, version: int | None) -> None:
    """Refuse completions that do not match the request; see ``score``."""
    name = prompt.prompt.id
    if len(answers) != group:
        raise DataError(f"prompt '{name}' got {len(answers)} completions; sampler.samples_per_prompt is {group}")
    for answer in answers:
        if not np.array_equal(answer.prompt_ids, prompt.ids):
            raise DataError(f"prompt '{name}': the sampler used other prompt tokens than it was sent")
        if not len(answer.response_ids):
            raise DataError(f"prompt '{name}': the sampler returned an empty response")
        check_version(prompt, answer.versions, version)


def check_version(prompt: EncodedPrompt, versions: np.ndarray, version: int | None) -> None:
    """Refuse tokens of another version than ``version``; None allows any."""
    if version is not None and (versions != version).any():
        wrong = sorted(set(versions.tolist()) - {version})
        raise DataError(f"prompt '{prompt.prompt.id}': tokens of policy version {wrong[0]}, asked for was {version}")
