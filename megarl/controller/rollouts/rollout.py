# SPDX-License-Identifier: Apache-2.0
"""Hold the scored trajectories of a step, turn them into training samples, and write the record of them."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from megarl.controller.rollouts.data import EncodedPrompt
from megarl.controller.rollouts.pieces import pieces_of
from megarl.files import replacing
from megarl.tasks.base import Reward
from megarl.types import ERROR, LIMITS, Completion, Sample, Trajectory

# Advantages of a trajectory's sequences: for each a number, or one per drawn token.
SequenceAdvantages = Sequence[float | np.ndarray]


@dataclass(frozen=True)
class Rollout:
    """The scored trajectories of one step. Each list has one entry per prompt, with the G samples of that prompt.

    Attributes:
        trajectories: what the samples became.
        texts: the decoded response of each sequence of each trajectory.
        rewards: of each trajectory.
        advantages: of each sequence of each trajectory.
        scores: ``[G]`` rewards that the advantages are made of; more if sequences have rewards of their own.
        mask_truncated: True if no token of a truncated trajectory is trained on (``loss.truncated: mask``).
        trained: indices of the prompts to train on, ascending; None for all.
        trainer_logprobs: the trainer's logprobs of some sequences, each ``[R]``, by prompt, trajectory and sequence.
    """

    prompts: list[EncodedPrompt]
    trajectories: list[list[Trajectory]]
    texts: list[list[list[str]]]
    rewards: list[list[Reward]]
    advantages: list[list[SequenceAdvantages]]
    scores: list[np.ndarray]
    mask_truncated: bool = False
    trained: list[int] | None = None
    trainer_logprobs: Mapping[tuple[int, int, int], np.ndarray] = field(default_factory=dict)

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
        """Return the training sequences of one prompt; each of its trajectories has at least one."""
        samples: list[Sample] = []
        for trajectory, advantages in zip(self.trajectories[index], self.advantages[index], strict=True):
            if not trajectory.sequences:
                samples.append(masked_sample(self.prompts[index].ids, index))
            masked = self.mask_truncated and trajectory.is_truncated
            samples += [
                masked_sample(np.concatenate([one.prompt_ids, one.response_ids]), index)
                if masked
                else to_sample(one, advantage, index)
                for one, advantage in zip(trajectory.sequences, advantages, strict=True)
            ]
        return samples

    def samples(self) -> list[Sample]:
        """Return the training sequences; those of a prompt are next to each other."""
        return [
            sample
            for index in (range(len(self.prompts)) if self.trained is None else self.trained)
            for sample in self.group(index)
        ]

    def metrics(self) -> dict[str, float]:
        """Compute means over the step: reward, its spread, the task's own metrics, lengths, shares.

        ``reward_std`` is the mean of the groups' standard deviations. The extremes are those of single trajectories,
        and advantages are those of all drawn groups, by sequence or by token as ``loss.advantage`` gives them.
        """
        flat = [reward for group in self.rewards for reward in group]
        trajectories = [one for group in self.trajectories for one in group]
        lengths = np.array([one.drawn_tokens for one in trajectories])
        scores = [np.array([reward.score for reward in group]) for group in self.rewards]
        given = [np.ravel(each) for group in self.advantages for sequences in group for each in sequences]
        metrics = {
            **statistics("reward", np.concatenate(scores)),
            "trained_reward": float(np.mean(np.concatenate(self.scores))),
            "reward_std": float(np.mean([group.std() for group in scores])),
            **statistics("advantage", np.concatenate(given or [np.zeros(1)])),
            "groups_without_signal": float(np.mean(np.logical_not(self.signals))),
            **statistics("response_tokens", lengths),
            "failed_rewards": float(np.mean([one.finish_reason == ERROR for one in trajectories])),
            "truncated": float(np.mean([one.is_truncated for one in trajectories])),
            "sampled_tokens": float(lengths.sum()),
            "prompt_tokens": float(np.mean([len(prompt.ids) for prompt in self.prompts])),
        }
        metrics |= episode_metrics(trajectories)
        names = sorted({name for reward in flat for name in reward.metrics})
        return metrics | {
            f"task/{name}": float(np.mean([reward.metrics[name] for reward in flat if name in reward.metrics]))
            for name in names
        }

    def example(self) -> tuple[str, str, float] | None:
        """Return the text of the first prompt's last message, its first response and that one's reward."""
        if not self.prompts:
            return None
        text = next(iter(self.texts[0][0]), "")
        return str(self.prompts[0].prompt.messages[-1]["content"]), text, self.rewards[0][0].score

    def write(self, file: Path, decode: Callable[[np.ndarray], str] | None = None) -> None:
        """Write one JSON line per sequence, with everything needed to inspect or repeat the training step.

        Args:
            file: is replaced.
            decode: function: ids -> text. Sequences with the trainer's logprobs then have the text of each token.
        """
        with replacing(file) as handle:
            for row in self._rows(decode):
                handle.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")

    def _rows(self, decode: Callable[[np.ndarray], str] | None) -> Iterator[dict[str, Any]]:
        for place, (prompt, *group) in enumerate(
            zip(self.prompts, self.trajectories, self.texts, self.rewards, self.advantages, strict=True)
        ):
            for index, (trajectory, texts, reward, advantages) in enumerate(zip(*group, strict=True)):
                about = {
                    "prompt": prompt.prompt.id,
                    "messages": [dict(message) for message in prompt.prompt.messages],
                    "reference": dict(prompt.prompt.data),
                    "sample": index,
                    "reward": reward.score,
                    "metrics": dict(reward.metrics),
                    "finish_reason": trajectory.finish_reason,
                }
                for number, parts in enumerate(zip(trajectory.sequences, texts, advantages, strict=True)):
                    row = about | {"sequence": number} | sequence_row(*parts)
                    compared = self.trainer_logprobs.get((place, index, number))
                    if compared is not None:
                        row["trainer_logprobs"] = [float(value) for value in compared]
                        if decode is not None:
                            row["pieces"] = pieces_of(parts[0].response_ids, decode)
                    yield row
                if not trajectory.sequences:
                    yield about | {"text": "", "prompt_ids": prompt.ids.tolist(), "response_ids": [], "logprobs": []}


def episode_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the mean number of turns, and the shares of episodes that each limit ended."""
    episodes = [one for one in trajectories if one.turns is not None]
    if not episodes:
        return {}
    ended = {f"ended_{end}": float(np.mean([one.finish_reason == end for one in episodes])) for end in LIMITS}
    return {"episode_turns": float(np.mean([one.turns for one in episodes])), **ended}


def sequence_row(sequence: Completion, text: str, advantage: float | np.ndarray) -> dict[str, Any]:
    """Return what a row of the record says of one sequence; ``drawn`` are the spans of tokens that were drawn."""
    versions = sequence.versions
    row = {
        "text": text,
        "advantage": np.asarray(advantage, dtype=float).tolist(),
        "version": int(versions[0]) if len(versions) else None,
        "last_version": int(versions[-1]) if len(versions) else None,
        "prompt_ids": sequence.prompt_ids.tolist(),
        "response_ids": sequence.response_ids.tolist(),
        "logprobs": [float(value) for value in sequence.logprobs],
    }
    return row if sequence.drawn is None else row | {"drawn": spans(sequence.drawn)}


def spans(drawn: np.ndarray) -> list[list[int]]:
    """Return begin and end of each run of True.

    >>> spans(np.array([True, True, False, True]))
    [[0, 2], [3, 4]]
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[False], drawn, [False]]).astype(np.int8)))
    return edges.reshape(-1, 2).tolist()


def statistics(name: str, values: np.ndarray) -> dict[str, float]:
    """Return mean (as ``name``), standard deviation, least and greatest of values ``[N]``, N > 0."""
    return {
        name: float(values.mean()),
        f"{name}_std": float(values.std()),
        f"{name}_min": float(values.min()),
        f"{name}_max": float(values.max()),
    }


def to_sample(sequence: Completion, advantage: float | np.ndarray, group: int) -> Sample:
    """Build a training sample from exactly the sampler's token ids; nothing is tokenised again."""
    return Sample(
        tokens=np.concatenate([sequence.prompt_ids, sequence.response_ids]),
        response_mask=sequence.mask,
        advantage=advantage,
        sampler_logprobs=sequence.logprobs,
        group=group,
    )


def masked_sample(tokens: np.ndarray, group: int) -> Sample:
    """Build the sample of a sequence that is not trained on: a sequence without response tokens.

    It adds nothing to the loss, and counts where ``loss.aggregation`` counts sequences. Two tokens stand for all of it,
    so that nothing is computed for tokens without a loss.
    """
    tokens = np.concatenate([tokens, tokens])[:2]  # a prompt may be one token
    return Sample(
        tokens=tokens,
        response_mask=np.zeros(len(tokens), dtype=bool),
        sampler_logprobs=np.zeros(0, dtype=np.float32),
        group=group,
    )
