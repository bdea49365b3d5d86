# SPDX-License-Identifier: Apache-2.0
"""Task ``reasoning_gym``: the puzzles of the package of that name, which generates and checks them, offline."""

import re
from typing import Any, Literal

from pydantic import Field

from megarl.config.base import Section
from megarl.errors import ConfigError, nearest
from megarl.tasks.base import Reward, TaskContext
from megarl.tasks.options import parse_options, refuse_path
from megarl.types import Prompt

TAGGED = re.compile(r"<answer>\s*(.*?)\s*</answer>", re.DOTALL)
INSTRUCTION = "Give the answer between <answer> and </answer>."


class ReasoningGymOptions(Section):
    dataset: str
    """Name of the generator (``basic_arithmetic``, ``countdown``, ``sudoku``, ...)."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """The generator's own settings (``{min_terms: 2, max_terms: 3}``)."""
    size: int = Field(10_000, ge=1, le=10_000_000)
    """Number of prompts in the data set."""
    answer: Literal["tags", "whole"] = "tags"
    """``tags``: the answer is what stands between the last ``<answer>`` and ``</answer>``, for which the prompt asks;
    ``whole``: it is the whole response."""


class ReasoningGymTask:
    """Prompt ``i`` is entry ``i`` of a data set, which depends only on its settings, ``train.seed`` and ``i``."""

    def __init__(self, dataset: Any, options: ReasoningGymOptions) -> None:
        """
        Args:
            dataset: of reasoning_gym: indexable, with ``score_answer(answer, entry)``.
            options: the task's options.
        """
        self._dataset, self._options = dataset, options

    def __len__(self) -> int:
        return self._options.size

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < len(self):
            raise IndexError(f"prompt {index} of a reasoning_gym task with {len(self)}")
        entry = self._dataset[index]
        asked = f"{entry['question']}\n{INSTRUCTION}" if self._options.answer == "tags" else entry["question"]
        return Prompt(
            id=f"{self._options.dataset}-{index}",
            messages=({"role": "user", "content": asked},),
            data={"index": index, "answer": entry["answer"]},
        )

    def reward(self, prompt: Prompt, response: str) -> Reward:
        """Score as reasoning_gym does, 0 to 1; an answer that is not there scores 0.

        Metrics: ``correct`` (the score is 1), ``answered``.
        """
        answer = self._answer(response)
        entry = self._dataset[prompt.data["index"]]
        score = 0.0 if answer is None else float(self._dataset.score_answer(answer, entry))
        return Reward(score, {"correct": float(score >= 1), "answered": float(answer is not None)}, answer or "")

    def _answer(self, response: str) -> str | None:
        if self._options.answer == "whole":
            return response.strip() or None
        found = TAGGED.findall(response)
        return found[-1] if found else None


def build(context: TaskContext) -> ReasoningGymTask:
    """Make the task from ``task.options`` and ``train.seed``.

    Raises:
        ConfigError: wrong options, ``task.path`` is set, the package is not installed, or it has no such generator or
            setting.
    """
    refuse_path(context)
    options = parse_options(context, ReasoningGymOptions)
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(
            f"task.name is '{context.config.name}', which needs the package reasoning-gym ({error}); install it: "
            "pip install reasoning-gym"
        ) from error
    if options.dataset not in DATASETS:
        raise ConfigError(
            f"task.options.dataset is '{options.dataset}', which is no generator of reasoning_gym"
            f"{nearest(options.dataset, DATASETS)}"
        )
    try:
        dataset = reasoning_gym.create_dataset(
            options.dataset, **{"size": options.size, "seed": context.seed} | options.settings
        )
    except Exception as error:  # its checks are assertions, and unknown settings a TypeError
        raise ConfigError(
            f"task.options.settings are {options.settings}, which reasoning_gym's {options.dataset} refuses: {error}"
        ) from error
    return ReasoningGymTask(dataset, options)
