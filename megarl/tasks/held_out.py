# SPDX-License-Identifier: Apache-2.0
"""Hold out the last prompts of a task, which a run is evaluated on and never trained on."""

from collections.abc import Hashable, Iterable

from megarl.errors import ConfigError
from megarl.tasks.base import Reward, Task
from megarl.types import Prompt


class TrainingPart:
    """A task without its held-out prompts, and without other prompts that ask what an evaluation asks.

    A prompt with such a question is replaced by the next prompt without one.
    """

    def __init__(self, task: Task, count: int, asked: Iterable[Prompt]) -> None:
        """
        Args:
            task: the whole task.
            count: number of held-out prompts, the task's last.
            asked: the prompts of all evaluations.
        """
        self._task, self._size = task, len(task) - count
        self._asked = {_question(prompt) for prompt in asked}

    @property
    def whole(self) -> Task:
        """The whole task."""
        return getattr(self._task, "whole", self._task)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < self._size:
            raise IndexError(f"prompt {index} of a task with {self._size} to train on")
        for step in range(self._size):
            prompt = self._task[(index + step) % self._size]
            if _question(prompt) not in self._asked:
                return prompt
        raise ConfigError(
            f"task.held_out is {len(self._task) - self._size}: every other prompt asks the same as one of those, or as "
            "one of eval.tasks; hold out fewer (limit of eval.tasks), or give the task more different prompts "
            "(task.options)"
        )

    def reward(self, prompt: Prompt, response: str) -> Reward:
        """Score like the whole task."""
        return self._task.reward(prompt, response)


def last_prompts(task: Task, count: int) -> list[Prompt]:
    """Return a task's last ``count`` prompts, which are held out.

    Raises:
        ConfigError: no prompts would be left to train on.
    """
    if count and count >= len(task):
        raise ConfigError(f"task.held_out is {count}, but the task has {len(task)} prompts; hold out fewer")
    return [task[index] for index in range(len(task) - count, len(task))]


def training_part(task: Task, count: int, asked: Iterable[Prompt] = ()) -> Task:
    """Return a task without its last ``count`` prompts, and without the questions of those and of other prompts.

    Args:
        task: the whole task.
        count: number of held-out prompts.
        asked: prompts of evaluations.

    Raises:
        ConfigError: no prompts would be left to train on.
    """
    asked = [*last_prompts(task, count), *asked]
    if not asked:
        return task
    part = TrainingPart(task, count, asked)
    part[0]  # raises now if all other prompts ask what an evaluation asks
    return part


def _question(prompt: Prompt) -> Hashable:
    return tuple((message["role"], message["content"]) for message in prompt.messages)
