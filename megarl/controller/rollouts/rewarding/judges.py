# SPDX-License-Identifier: Apache-2.0
"""Choose the process that judges a task's answers: one that computes rewards, or one that plays its episodes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.controller.rollouts.data import EncodedPrompt
from megarl.controller.rollouts.playing.episode_process import EpisodeProcess
from megarl.controller.rollouts.rewarding.pool import RewardPool
from megarl.controller.rollouts.rewarding.rewards import DRY_RESPONSE, RewardProcess
from megarl.tasks import TaskContext
from megarl.tasks.base import Reward

Judge = RewardProcess | RewardPool | EpisodeProcess


def start_judge(context: TaskContext, log: Path, model: str, plays: bool) -> Judge:
    """Start the process of a task.

    Args:
        context: the task's context.
        log: file of the process's output.
        model: folder of the model, whose tokenizer an environment uses.
        plays: whether the task is an environment.
    """
    if plays:
        return EpisodeProcess(context, log, model)
    return RewardPool(context, log) if context.config.reward_processes > 1 else RewardProcess(context, log)


def dry_response(tokenizer: Any) -> list[int]:
    """Return the tokens of ``DRY_RESPONSE``, with the one that ends a text if the tokenizer has it."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [*tokenizer.encode(DRY_RESPONSE, add_special_tokens=False), *end]


def dry_run(judge: Judge, prompt: EncodedPrompt, ids: Sequence[int], group: int) -> Reward:
    """Try a reward, or an environment, on plain text before anything else is started.

    Args:
        judge: the process.
        prompt: the prompt.
        ids: ``dry_response``.
        group: see ``RewardProcess.dry_run``.

    Raises:
        MegarlError: the task cannot be loaded, raised, or gave no reward.
    """
    if isinstance(judge, EpisodeProcess):
        return judge.dry_run(prompt, ids)
    return judge.dry_run(prompt.prompt, ids, group)
