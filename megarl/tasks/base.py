# SPDX-License-Identifier: Apache-2.0
"""Define the interface of a task: prompts with a verifiable reward. Does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megarl.config import TaskConfig
from megarl.types import Prompt


@dataclass(frozen=True)
class Reward:
    """The score and metrics of one completion.

    Attributes:
        score: the number that training maximises.
        metrics: named numbers to log, averaged over the step (``{"correct": 1.0}``).
        answer: the answer that the completion gives, by which maj@k votes; empty if it gives none. None: the reward
            does not say.
        failed: set by megarl, for completions that could not be judged.
    """

    score: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    answer: str | None = None
    failed: bool = False


# The reward of an answer that could not be judged: no metric of a right one is missing.
NOTHING = Reward(0.0, {}, "", failed=True)


class Task(Protocol):
    """A finite, indexable set of prompts, with the reward of a completion.

    ``task[i]`` must be the same prompt at every call and in every process. The controller decides on order and epochs.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Prompt: ...

    def reward(self, prompt: Prompt, response: str) -> Reward:
        """Score the decoded response to ``prompt`` (special tokens removed).

        A task of the user's own may name the second parameter ``completion``, ``responses`` or ``completions``, or
        make this an ``async def``; see ``megarl.tasks.rewards.forms``.
        """
        ...


@dataclass(frozen=True)
class TaskContext:
    """The arguments of a task factory.

    Attributes:
        config: the ``task`` section.
        recipe_dir: folder of the recipe; relative paths in ``config`` are resolved against it.
        seed: ``train.seed``.
    """

    config: TaskConfig
    recipe_dir: Path
    seed: int


def is_environment(task: Any) -> bool:
    """Return True if the prompts of a task are answered by episodes; see ``megarl.environments``."""
    return hasattr(getattr(task, "whole", task), "rollout")
