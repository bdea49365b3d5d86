# SPDX-License-Identifier: Apache-2.0
"""Evaluate one policy version on sets of prompts: sample, score, estimate."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from megarl.config.sections.eval import Sampling
from megarl.controller.actors.logs import log_file
from megarl.controller.rollouts.data import EncodedPrompt
from megarl.controller.rollouts.rewards import RewardProcess
from megarl.controller.rollouts.rollout import Decode, Rollout, score
from megarl.evaluation.results import SetResult, check_reward, measure
from megarl.evaluation.sets import EvalSet
from megarl.sampler.seeds import seed_from
from megarl.types import Completion

# Sets the seeds of evaluations apart from those of training.
SEED = 0x6576616C


class Evaluator(Protocol):
    """A sampler to evaluate: the engines of a run, or one engine."""

    def generate(
        self, prompts: Sequence[np.ndarray], version: int, seeds: Sequence[int], sampling: Sampling
    ) -> list[list[Completion]]:
        """Sample from one version; see ``VllmSampler.generate``."""
        ...


class Evaluated(NamedTuple):
    """The result of one set, with its completions."""

    result: SetResult
    rollout: Rollout


class Evaluation:
    """Evaluates versions on the same prompts with the same seeds, so that two of one version agree.

    They agree but for rounding that depends on the composition of vLLM's batches.
    """

    def __init__(
        self, sets: Sequence[EvalSet], decode: Decode, seed: int, logs: Path, run_rewards: RewardProcess | None = None
    ) -> None:
        """Start the processes that score the sets.

        Args:
            sets: the sets.
            decode: function: response ids -> text.
            seed: ``sampler.seed``.
            logs: folder of the processes' logs.
            run_rewards: scores the sets without a context, which are the run's own prompts.
        """
        self.sets, self._decode, self._seed, self._run_rewards = list(sets), decode, seed, run_rewards
        self._own = {
            one.key: RewardProcess(one.context, log_file(logs, f"rewards-{one.key}"))
            for one in self.sets
            if one.context is not None
        }

    def dry_run(self, ids: Sequence[int]) -> None:
        """Call each set's reward once, and check that its metrics can be computed from what it gives.

        Args:
            ids: the tokens of ``rewards.DRY_RESPONSE``.

        Raises:
            RewardError: see ``RewardProcess.dry_run``.
            ConfigError: see ``check_reward``.
        """
        for one in self.sets:
            check_reward(one.config, self._rewards(one).dry_run(one.prompts[0], ids, one.sampling.samples))

    def run(self, sampler: Evaluator, version: int, look: Callable[[], None] = lambda: None) -> Mapping[str, Evaluated]:
        """Evaluate a version; return the result of each set by its key.

        Args:
            sampler: the engine or engines, which must hold the version.
            version: the policy version.
            look: called now and then while rewards are computed; what it raises ends the wait.

        Raises:
            MegarlError: sampling or scoring failed.
        """
        return {one.key: self._run(one, sampler, version, look) for one in self.sets}

    def close(self) -> None:
        """End the processes. Safe to call twice."""
        for rewards in self._own.values():
            rewards.close()

    def _rewards(self, one: EvalSet) -> RewardProcess:
        rewards = self._own.get(one.key, self._run_rewards)
        assert rewards is not None
        return rewards

    def _run(self, one: EvalSet, sampler: Evaluator, version: int, look: Callable[[], None]) -> Evaluated:
        prompts = [EncodedPrompt(prompt, ids) for prompt, ids in zip(one.prompts, one.ids, strict=True)]
        seeds = [seed_from(self._seed, SEED, index) for index in range(len(prompts))]
        rollout = score(
            prompts,
            sampler.generate([prompt.ids for prompt in prompts], version, seeds, one.sampling),
            lambda groups: self._rewards(one).score(groups, look),
            self._decode,
            np.zeros_like,
            group=one.sampling.samples,
            version=version,
        )
        lengths = np.array([[len(answer.response_ids) for answer in group] for group in rollout.completions])
        truncated = np.array([[answer.finish_reason == "length" for answer in group] for group in rollout.completions])
        return Evaluated(measure(one, rollout.rewards, lengths, truncated), rollout)
