# SPDX-License-Identifier: Apache-2.0
"""``task.reward: file.py:function``: a reward of the user's own for any task.

The function is called as ``function(prompt, response)`` with a ``megarl.types.Prompt`` and the decoded response, and
returns a number or a ``megarl.tasks.Reward``.
"""

import inspect
import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import numpy as np

from megarl.errors import ConfigError, RewardError, nearest
from megarl.files import find_file
from megarl.plugins import import_file
from megarl.tasks.base import Reward, Task, TaskContext
from megarl.types import LARGEST_REWARD, Prompt

RewardFunction = Callable[[Prompt, str], Any]


class RewardedTask:
    """A task whose reward is replaced; prompts are untouched."""

    def __init__(self, task: Task, name: str, function: RewardFunction) -> None:
        """
        Args:
            task: gives the prompts.
            name: what to call the function in messages (``"reward.py:score"``).
            function: ``(prompt, response) -> float | Reward``.
        """
        self._task = task
        self._name = name
        self._function = function

    def __len__(self) -> int:
        return len(self._task)

    def __getitem__(self, index: int) -> Prompt:
        return self._task[index]

    def reward(self, prompt: Prompt, response: str) -> Reward:
        """Call the function and check what it returns.

        Raises:
            RewardError: it raised, or returned neither a finite number nor a ``Reward`` of finite numbers.
        """
        try:
            verdict = self._function(prompt, response)
        except Exception as error:
            # Time limits by signal (math-verify's own, for one) work in the main thread only.
            hint = "; set task.reward_threads=1" if "main thread" in str(error) else ""
            raise RewardError(
                f"task.reward {self._name} raised {type(error).__name__} for prompt '{prompt.id}': {error}{hint}"
            ) from error
        if not isinstance(verdict, Reward):
            verdict = Reward(verdict)
        return Reward(
            self._finite("the score", verdict.score, prompt),
            {key: self._finite(f"metric '{key}'", value, prompt) for key, value in verdict.metrics.items()},
        )

    def _finite(self, what: str, value: Any, prompt: Prompt) -> float:
        # Real covers bool, int, float and NumPy's numbers; str, None and tensors are mistakes.
        if not isinstance(value, Real | np.bool_):
            raise RewardError(
                f"task.reward {self._name} returned {value!r} ({type(value).__name__}) as {what} for prompt "
                f"'{prompt.id}'; return a float or a megarl.tasks.Reward"
            )
        try:
            number = float(value)
        except OverflowError:  # an integer
            number = math.inf
        if not abs(number) <= LARGEST_REWARD:
            raise RewardError(
                f"task.reward {self._name} returned {number!r} as {what} for prompt '{prompt.id}'; it must be finite "
                f"and within +-{LARGEST_REWARD:g}"
            )
        return number


def load_reward(context: TaskContext, spec: str) -> RewardFunction:
    """Import the function that ``file.py:function`` names.

    Args:
        context: the task's context; a relative file is looked up beside the recipe, then in the current folder.
        spec: the value of ``task.reward``.

    Raises:
        ConfigError: malformed, no such file, the file cannot be imported, no such function, or one that cannot be
            called with ``(prompt, response)``.
    """
    file_name, colon, name = spec.rpartition(":")
    if not colon or not file_name.endswith(".py") or not name.isidentifier():
        raise ConfigError(f"task.reward is '{spec}'; it must have the form file.py:function")
    file = find_file("task.reward", file_name, context.recipe_dir)
    module = import_file(file, "task.reward", spec)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise ConfigError(
            f"task.reward is '{spec}', but {file} has no function '{name}'{nearest(name, functions)} "
            f"(it has: {', '.join(functions) or 'none'})"
        )
    try:
        inspect.signature(function).bind("prompt", "response")
    except TypeError as error:
        raise ConfigError(f"task.reward {spec} must take (prompt, response): {error}") from error
    except ValueError:
        pass  # a callable without a readable signature is tried when it is called
    return function
