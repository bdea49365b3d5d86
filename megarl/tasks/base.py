# SPDX-License-Identifier: Apache-2.0
"""What a task is: prompts with a verifiable reward. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from megarl.config import TaskConfig
from megarl.types import Prompt


@dataclass(frozen=True)
class Reward:
    """The verdict on one completion.

    Attributes:
        score: the scalar that is optimised.
        metrics: named numbers to log, averaged over the step (``{"correct": 1.0}``).
    """

    score: float
    metrics: Mapping[str, float] = field(default_factory=dict)


class Task(Protocol):
    """A finite, indexable set of prompts and the reward of a completion.

    ``task[i]`` must be the same prompt at every call and in every process; the controller owns order and epochs.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Prompt: ...

    def reward(self, prompt: Prompt, response: str) -> Reward:
        """Score the decoded response (special tokens removed) to ``prompt``."""
        ...


@dataclass(frozen=True)
class TaskContext:
    """What a task factory gets.

    Attributes:
        config: the ``task`` section.
        recipe_dir: folder of the recipe; relative paths in ``config`` are resolved against it.
        seed: ``train.seed``.
    """

    config: TaskConfig
    recipe_dir: Path
    seed: int
