# SPDX-License-Identifier: Apache-2.0
"""Turn completions into rewards, advantages and training samples, and write the record of them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megarl.controller.rollouts.data import EncodedPrompt
from megarl.controller.rollouts.scoring import Group
from megarl.errors import DataError
from megarl.files import replacing
from megarl.loss.advantages import Advantages
from megarl.tasks.base import Reward
from megarl.types import Completion, DecodedCompletion, Sample

Decode = Callable[[np.ndarray], str]


@dataclass(frozen=True)
class Rollout:
    """The scored completions of one step. Each list has one entry per prompt, with the G completions of that prompt.

    Attributes:
        mask_truncated: True if no token of a truncated completion is trained on (``loss.truncated: mask``).
        trained: indices of the prompts to train on, ascending; None for all.
    """

    prompts: list[EncodedPrompt]
    completions: list[list[Completion]]
    texts: list[list[str]]
    rewards: list[list[Reward]]
    advantages: list[Advantages]
    scores: list[np.ndarray]
    mask_truncated: bool = False
    trained: list[int] | None = None

    @property
    def signals(self) -> list[bool]:
        """For each prompt, True if any token that is trained on has an advantage other than 0."""
        return [any(sample.has_signal for sample in self.group(index)) for index in range(len(self.prompts))]

    def with_more(self, other: "Rollout") -> "Rollout":
        """Return the prompts of both, this rollout's first, all of them to train on."""
        return self._with({name: value + getattr(other, name) for name, value in self._lists().items()})

    def split(self) -> list["Rollout"]:
        """Return a rollout for each prompt."""
        lists = self._lists()
        return [
            self._with({name: value[index : index + 1] for name, value in lists.items()})
            for index in range(len(self.prompts))
        ]

    def _lists(self) -> dict[str, list]:
        """Return the fields that have one entry per prompt."""
        return {name: value for name, value in vars(self).items() if isinstance(value, list) and name != "trained"}

    def _with(self, lists: dict[str, Any]) -> "Rollout":
        return replace(self, trained=None, **lists)

    def group(self, index: int) -> list[Sample]:
        """Return the training sequences of one prompt's completions."""
        return [
            masked_sample(completion, index)
            if self.mask_truncated and completion.finish_reason == "length"
            else to_sample(completion, advantage, index)
            for completion, advantage in zip(self.completions[index], self.advantages[index], strict=True)
        ]

    def samples(self) -> list[Sample]:
        """Return the training sequences; the completions of a prompt are next to each other."""
        return [
            sample
            for index in (range(len(self.prompts)) if self.trained is None else self.trained)
            for sample in self.group(index)
        ]

    def metrics(self) -> dict[str, float]:
        """Compute means over the step: reward, its spread, the task's own metrics, lengths, shares.

        ``reward_std`` is the mean of the groups' standard deviations. The extremes are those of single completions, and
        advantages are those of all drawn groups, by completion or by token as ``loss.advantage`` gives them.
        """
        flat = [reward for group in self.rewards for reward in group]
        completions = [completion for group in self.completions for completion in group]
        lengths = np.array([len(completion.response_ids) for completion in completions])
        scores = [np.array([reward.score for reward in group]) for group in self.rewards]
        advantages = np.concatenate([np.ravel(advantage) for group in self.advantages for advantage in group])
        metrics = {
            **statistics("reward", np.concatenate(scores)),
            "trained_reward": float(np.mean(np.concatenate(self.scores))),
            "reward_std": float(np.mean([group.std() for group in scores])),
            **statistics("advantage", advantages),
            "groups_without_signal": float(np.mean(np.logical_not(self.signals))),
            **statistics("response_tokens", lengths),
            "truncated": float(np.mean([completion.finish_reason == "length" for completion in completions])),
            "sampled_tokens": float(lengths.sum()),
            "prompt_tokens": float(np.mean([len(prompt.ids) for prompt in self.prompts])),
        }
        names = sorted({name for reward in flat for name in reward.metrics})
        return metrics | {
            f"task/{name}": float(np.mean([reward.metrics[name] for reward in flat if name in reward.metrics]))
            for name in names
        }

    def example(self) -> tuple[str, str, float] | None:
        """Return the text of the first prompt's last message, its first completion and that one's reward."""
        if not self.prompts:
            return None
        return str(self.prompts[0].prompt.messages[-1]["content"]), self.texts[0][0], self.rewards[0][0].score

    def write(self, file: Path) -> None:
        """Write one JSON line per completion, with everything needed to inspect or repeat the training step."""
        with replacing(file) as handle:
            for prompt, completions, texts, rewards, advantages in zip(
                self.prompts, self.completions, self.texts, self.rewards, self.advantages, strict=True
            ):
                for completion, text, reward, advantage in zip(completions, texts, rewards, advantages, strict=True):
                    row = {
                        "prompt": prompt.prompt.id,
                        "messages": [dict(message) for message in prompt.prompt.messages],
                        "reference": dict(prompt.prompt.data),
                        "text": text,
                        "reward": reward.score,
                        "metrics": dict(reward.metrics),
                        "advantage": np.asarray(advantage, dtype=float).tolist(),
                        "version": int(completion.versions[0]) if len(completion.versions) else None,
                        "last_version": int(completion.versions[-1]) if len(completion.versions) else None,
                        "finish_reason": completion.finish_reason,
                        "prompt_ids": completion.prompt_ids.tolist(),
                        "response_ids": completion.response_ids.tolist(),
                        "logprobs": [float(value) for value in completion.logprobs],
                    }
                    handle.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")


def statistics(name: str, values: np.ndarray) -> dict[str, float]:
    """Return mean (as ``name``), standard deviation, least and greatest of values ``[N]``, N > 0."""
    return {
        name: float(values.mean()),
        f"{name}_std": float(values.std()),
        f"{name}_min": float(values.min()),
        f"{name}_max": float(values.max()),
    }


def score(
    prompts: Sequence[EncodedPrompt],
    completions: Sequence[Sequence[Completion]],
    rewards_of: Callable[[Sequence[Group]], list[Reward]],
    decode: Decode,
    advantages_of: Callable[[np.ndarray], Advantages],
    *,
    group: int,
    version: int | None,
    scores_of: Callable[[np.ndarray, Sequence[Completion]], np.ndarray] = lambda scores, _: scores,
    mask_truncated: bool = False,
) -> Rollout:
    """Check and score what the samplers returned.

    Args:
        prompts: as sent.
        completions: as returned, per prompt.
        rewards_of: function: prompts, each with its completions -> the rewards of all completions in order, such as
            ``RewardProcess.score``.
        decode: function: response ids -> text without special tokens.
        advantages_of: function: rewards ``[G]`` -> advantages, one entry per completion: a number, or ``[R]``.
        group: number of completions expected per prompt.
        version: the policy version that must have sampled every token; None for any.
        scores_of: function: rewards ``[G]`` and the completions -> the scores that advantages are made of ``[G]``.
        mask_truncated: see ``Rollout``.

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
    scores = [
        scores_of(np.array([reward.score for reward in group_rewards]), answers)
        for group_rewards, answers in zip(rewards, completions, strict=True)
    ]
    advantages = [advantages_of(group_scores) for group_scores in scores]
    groups = [list(answers) for answers in completions]
    return Rollout(list(prompts), groups, texts, rewards, advantages, scores, mask_truncated)


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
        if version is not None and (answer.versions != version).any():
            wrong = sorted(set(answer.versions.tolist()) - {version})
            raise DataError(f"prompt '{name}': tokens of policy version {wrong[0]}, asked for was {version}")


def to_sample(completion: Completion, advantage: float | np.ndarray, group: int) -> Sample:
    """Build a training sample from exactly the sampler's token ids; nothing is tokenised again."""
    prompt, response = completion.prompt_ids, completion.response_ids
    mask: np.ndarray = np.zeros(len(prompt) + len(response), dtype=bool)
    mask[len(prompt) :] = True
    return Sample(
        tokens=np.concatenate([prompt, response]),
        response_mask=mask,
        advantage=advantage,
        sampler_logprobs=completion.logprobs,
        group=group,
    )


def masked_sample(completion: Completion, group: int) -> Sample:
    """Build the sample of a completion that is not trained on: a sequence without response tokens.

    It adds nothing to the loss, and counts where ``loss.aggregation`` counts sequences. Two tokens stand for all of it,
    so that nothing is computed for tokens without a loss.
    """
    tokens = np.concatenate([completion.prompt_ids, completion.response_ids])[:2]
    return Sample(
        tokens=tokens,
        response_mask=np.zeros(len(tokens), dtype=bool),
        sampler_logprobs=completion.logprobs[:0],
        group=group,
    )
