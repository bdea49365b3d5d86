# SPDX-License-Identifier: Apache-2.0
"""Evaluate one policy version on sets of prompts: sample, score, estimate."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from megarl.config.sections.eval import Sampling
from megarl.controller.actors.dispatch import Home
from megarl.controller.actors.logs import log_file
from megarl.controller.rollouts.data import EncodedPrompt
from megarl.controller.rollouts.playing.episode_process import EpisodeProcess
from megarl.controller.rollouts.playing.episodes import Turns, ask_engine
from megarl.controller.rollouts.rewarding.judges import Judge, dry_run, start_judge
from megarl.controller.rollouts.rewarding.judging import Decode, Rules, judge, score
from megarl.controller.rollouts.rollout import Rollout
from megarl.evaluation.results import SetResult, check_reward, measure
from megarl.evaluation.sets import EvalSet
from megarl.sampler.seeds import seed_from
from megarl.types import Completion

# Sets the seeds of evaluations apart from those of training.
SEED = 0x6576616C


class Evaluator(Turns, Protocol):
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
        self, sets: Sequence[EvalSet], decode: Decode, seed: int, logs: Path, model: str, run_judge: Judge | None = None
    ) -> None:
        """Start the processes that score the sets.

        Args:
            sets: the sets.
            decode: function: response ids -> text.
            seed: ``sampler.seed``.
            logs: folder of the processes' logs.
            model: folder of the model, whose tokenizer environments use.
            run_judge: judges the sets without a context, which are the run's own prompts.
        """
        self.sets, self._decode, self._seed, self._run_judge = list(sets), decode, seed, run_judge
        self._judges = {
            one.key: start_judge(one.context, log_file(logs, f"rewards-{one.key}"), model, one.plays)
            for one in self.sets
            if one.context is not None
        }

    def dry_run(self, ids: Sequence[int]) -> None:
        """Call each set's reward once, and check that its metrics can be computed from what it gives.

        Args:
            ids: ``judges.dry_response``.

        Raises:
            MegarlError: see ``judges.dry_run``.
            ConfigError: see ``check_reward``.
        """
        for one in self.sets:
            prompt = EncodedPrompt(one.prompts[0], one.ids[0])
            check_reward(one.config, dry_run(self._judge(one), prompt, ids, one.sampling.samples))

    def run(self, sampler: Evaluator, version: int, look: Callable[[], None] = lambda: None) -> Mapping[str, Evaluated]:
        """Evaluate a version; return the result of each set by its key.

        Args:
            sampler: the engine or engines, which must hold the version.
            version: the policy version.
            look: called now and then while it waits; what it raises ends the wait.

        Raises:
            MegarlError: sampling or scoring failed.
        """
        return {one.key: self._run(one, sampler, version, look) for one in self.sets}

    def close(self) -> None:
        """End the processes. Safe to call twice."""
        for running in self._judges.values():
            running.close()

    def _judge(self, one: EvalSet) -> Judge:
        chosen = self._judges.get(one.key, self._run_judge)
        assert chosen is not None
        return chosen

    def _run(self, one: EvalSet, sampler: Evaluator, version: int, look: Callable[[], None]) -> Evaluated:
        prompts = [EncodedPrompt(prompt, ids) for prompt, ids in zip(one.prompts, one.ids, strict=True)]
        seeds = [seed_from(self._seed, SEED, index) for index in range(len(prompts))]
        rollout = self._rollout(one, prompts, seeds, sampler, version, look)
        lengths = np.array([[answer.drawn_tokens for answer in group] for group in rollout.trajectories])
        truncated = np.array([[answer.is_truncated for answer in group] for group in rollout.trajectories])
        return Evaluated(measure(one, rollout.rewards, lengths, truncated), rollout)

    def _rollout(
        self,
        one: EvalSet,
        prompts: list[EncodedPrompt],
        seeds: list[int],
        sampler: Evaluator,
        version: int,
        look: Callable[[], None],
    ) -> Rollout:
        process = self._judge(one)
        if isinstance(process, EpisodeProcess):
            asks = [partial(ask_engine, sampler, version, Home()) for _ in prompts]
            played = process.play(prompts, asks, seeds, one.sampling, look)
            return judge(prompts, played, Rules(), version=version)
        return score(
            prompts,
            sampler.generate([prompt.ids for prompt in prompts], version, seeds, one.sampling),
            lambda groups: process.score(groups, look),
            self._decode,
            Rules(),
            group=one.sampling.samples,
            version=version,
        )
