# SPDX-License-Identifier: Apache-2.0
"""Hold out the last prompts of a task, which a run is evaluated on and never trained on."""

from collections.abc import Hashable

from megarl.errors import ConfigError
from megarl.tasks.base import Reward, Task
from megarl.types import Prompt


class TrainingPart:
    """A task without its held-out prompts, and without other prompts that ask the same question.

    A prompt with the question of a held-out one is replaced by the next prompt without such a question.
    """

    def __init__(self, task: Task, held_out: list[Prompt]) -> None:
        """
        Args:
            task: the whole task.
            held_out: the last prompts of ``task``.
        """
        self._task, self._size = task, len(task) - len(held_out)
        self._asked = {_question(prompt) for prompt in held_out}

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
            f"task.held_out is {len(self._task) - self._size}: every other prompt asks the same as one of those; hold "
            "out fewer, or give the task more different prompts (task.options)"
        )

    def reward(self, prompt: Prompt, response: str) -> Reward:
        """Score like the whole task."""
        return self._task.reward(prompt, response)


def split(task: Task, count: int) -> tuple[Task, list[Prompt]]:
    """Hold out a task's last ``count`` prompts; return ``(training part, held-out prompts)``.

    Raises:
        ConfigError: no prompts would be left to train on.
    """
    if not count:
        return task, []
    if count >= len(task):
        raise ConfigError(f"task.held_out is {count}, but the task has {len(task)} prompts; hold out fewer")
    held_out = [task[index] for index in range(len(task) - count, len(task))]
    part = TrainingPart(task, held_out)
    part[0]  # raises now if all other prompts ask held-out questions
    return part, held_out


def _question(prompt: Prompt) -> Hashable:
    return tuple((message["role"], message["content"]) for message in prompt.messages)
