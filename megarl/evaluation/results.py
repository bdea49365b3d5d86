# SPDX-License-Identifier: Apache-2.0
"""Compute the metrics of an evaluation from the rewards of its completions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.config.sections.eval import EvalTaskConfig
from megarl.errors import ConfigError, RewardError
from megarl.evaluation.estimates import maj_at_k, pass_at_k
from megarl.evaluation.intervals import Estimate, average, share
from megarl.evaluation.sets import EvalSet
from megarl.tasks.base import Reward

# Value of ``right`` that means the reward itself.
REWARD = "reward"


@dataclass(frozen=True)
class SetResult:
    """The metrics of one set.

    Attributes:
        measured: the set.
        values: metric -> its value of each prompt, ``[P]``; nan where a prompt has none.
        estimates: metric -> the mean over prompts, with its interval.
    """

    measured: EvalSet
    values: Mapping[str, np.ndarray]
    estimates: Mapping[str, Estimate]

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON-able values."""
        sampling = self.measured.sampling
        return {
            "prompts": len(self.measured.prompts),
            "dropped_prompts": self.measured.dropped,
            **vars(sampling),
            "metrics": {name: vars(estimate) for name, estimate in self.estimates.items()},
        }

    def row(self) -> dict[str, float]:
        """Return the metrics as they stand in a row: ``eval/KEY/METRIC``, with ``_low`` and ``_high``."""
        flat: dict[str, float] = {}
        for name, estimate in self.estimates.items():
            parts = {"": estimate.value, "_low": estimate.low, "_high": estimate.high}
            flat |= {f"eval/{self.measured.key}/{name}{end}": x for end, x in parts.items() if x is not None}
        return flat


def measure(
    measured: EvalSet, rewards: Sequence[Sequence[Reward]], lengths: np.ndarray, truncated: np.ndarray
) -> SetResult:
    """Compute the metrics of a set.

    Args:
        measured: the set.
        rewards: of each prompt's completions, ``[P][n]``.
        lengths: tokens of each completion, ``[P, n]``.
        truncated: True for a completion that reached the limit, ``[P, n]``.

    Raises:
        ConfigError: a metric that was asked for cannot be computed from these rewards; see ``check_reward``.
    """
    values = {
        "reward": np.array([[reward.score for reward in group] for group in rewards]),
        "response_tokens": lengths.astype(float),
        "truncated": truncated.astype(float),
    }
    for name in sorted({name for group in rewards for reward in group for name in reward.metrics} - values.keys()):
        # What could not be judged is not right, in the mean as in pass@k.
        absent = 0.0 if name == measured.config.right else np.nan
        values[name] = np.array(
            [[reward.metrics.get(name, absent if reward.failed else np.nan) for reward in group] for group in rewards]
        )
    # An interval for shares holds for 0 and 1; a mean of other values is bootstrapped.
    shares = {name for name, each in values.items() if np.isin(each[~np.isnan(each)], (0.0, 1.0)).all()}
    means = {name: _means(each) for name, each in values.items()}
    wanted = measured.config.wanted()
    if wanted:
        for reward in (reward for group in rewards for reward in group if not reward.failed):
            check_reward(measured.config, reward)
        right = [[_right(measured.config, reward) for reward in group] for group in rewards]
        for name, (kind, k) in wanted.items():
            means[name] = np.array(
                [
                    pass_at_k(np.array(hits) > 0.5, k)
                    if kind == "pass"
                    else maj_at_k([str(reward.answer) for reward in group], hits, k)
                    for group, hits in zip(rewards, right, strict=True)
                ]
            )
            shares.add(name)
    estimates = {}
    for name, each in means.items():
        known = each[~np.isnan(each)]
        estimates[name] = share(known, known.size * measured.sampling.samples) if name in shares else average(known)
    return SetResult(measured, means, estimates)


def check_reward(config: EvalTaskConfig, reward: Reward) -> None:
    """Check that the metrics of a set can be computed from a reward like this one.

    Raises:
        ConfigError: it lacks the metric that ``right`` names, or for maj@K the answer.
    """
    wanted = config.wanted()
    if wanted and config.right != REWARD and config.right not in reward.metrics:
        has = f"it gives: {', '.join(sorted(reward.metrics))}" if reward.metrics else "it gives none"
        raise ConfigError(
            f"evaluation '{config.key}': {next(iter(wanted))} needs the reward's metric '{config.right}' ({has}); set "
            f"right to one of its metrics, or to {REWARD} (a reward of at least 1 is right)"
        )
    for name, (kind, _) in wanted.items():
        if kind == "maj" and reward.answer is None:
            raise ConfigError(
                f"evaluation '{config.key}': {name} needs the answer of each completion, which the reward does not "
                "give; return megarl.tasks.Reward(score, metrics, answer), with an empty answer if there is none"
            )


def _right(config: EvalTaskConfig, reward: Reward) -> float:
    if reward.failed:
        return 0.0
    value = reward.score if config.right == REWARD else reward.metrics[config.right]
    if config.right != REWARD and value not in (0.0, 1.0):
        raise RewardError(
            f"evaluation '{config.key}': the reward's metric '{config.right}' is {value}, but says what is right; it "
            "must be 0 or 1"
        )
    return float(value >= 1.0)


def _means(each: np.ndarray) -> np.ndarray:
    """Return the mean of each prompt's known values, ``[P]``; nan if a prompt has none."""
    known = ~np.isnan(each)
    counts = known.sum(axis=1)
    return np.where(counts > 0, np.where(known, each, 0.0).sum(axis=1) / np.maximum(counts, 1), np.nan)
