# SPDX-License-Identifier: Apache-2.0
"""Load ``task.reward``, ``file.py:function``: a user's reward for any task.

The function is called as ``function(prompt, response)`` with a ``megarl.types.Prompt`` and the decoded response. It
returns a number, a ``megarl.tasks.Reward`` or a dictionary of components. The name of its second parameter and
``async def`` select another form; see ``megarl.tasks.rewards.forms``.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from megarl.errors import ConfigError, RewardError
from megarl.plugins import load_object
from megarl.tasks.base import Reward, Task, TaskContext
from megarl.tasks.rewards.forms import form_of, one_for_each
from megarl.tasks.rewards.verdicts import Verdicts
from megarl.types import Prompt

RewardFunction = Callable[[Prompt, Any], Any]


class RewardedTask:
    """A task with another reward; its prompts are unchanged."""

    def __init__(
        self, task: Task, name: str, function: RewardFunction, weights: Mapping[str, float] | None = None
    ) -> None:
        """
        Args:
            task: the task that gives the prompts.
            name: the function's name in messages (``"reward.py:score"``).
            function: ``(prompt, response) -> float | Reward | dictionary``, or another form of it.
            weights: of the components, if the function returns a dictionary of them.
        """
        self._task = task
        self._name = name
        self._function = function
        self._verdicts = Verdicts(f"task.reward {name}", weights or {})
        self.reward_form = form_of(function)

    def __len__(self) -> int:
        return len(self._task)

    def __getitem__(self, index: int) -> Prompt:
        return self._task[index]

    def reward(self, prompt: Prompt, given: Any) -> Any:
        """Call the function and check its result.

        Args:
            prompt: the prompt.
            given: the response, or what else ``reward_form`` says that the function takes.

        Returns:
            The ``Reward``, a list of them if the function scores a group, or a coroutine of either if it is async.

        Raises:
            RewardError: the function raised, or returned neither a finite number nor a ``Reward`` of finite numbers.
        """
        if self.reward_form.is_async:
            return self._reward_later(prompt, given)
        with self._named(prompt):
            verdict = self._function(prompt, given)
        return self._checked(verdict, prompt, given)

    async def _reward_later(self, prompt: Prompt, given: Any) -> Any:
        with self._named(prompt):
            verdict = await self._function(prompt, given)
        return self._checked(verdict, prompt, given)

    @contextmanager
    def _named(self, prompt: Prompt) -> Iterator[None]:
        """Turn what the function raises into an error that names function and prompt."""
        try:
            yield
        except Exception as error:
            # Timeouts by signal (such as math-verify's) work in the main thread only.
            hint = "; set task.reward_threads=1" if "main thread" in str(error) else ""
            raise RewardError(
                f"task.reward {self._name} raised {type(error).__name__} for prompt '{prompt.id}': {error}{hint}"
            ) from error

    def _checked(self, verdict: Any, prompt: Prompt, given: Any) -> Reward | list[Reward]:
        if not self.reward_form.is_group:
            return self._verdicts.reward(verdict, prompt)
        verdicts = one_for_each(verdict, len(given), f"task.reward {self._name} for prompt '{prompt.id}'")
        return [self._verdicts.reward(value, prompt) for value in verdicts]


def load_reward(context: TaskContext, spec: str) -> RewardFunction:
    """Import the function that ``file.py:function`` or ``package.module:function`` names.

    Args:
        context: the task's context. A relative path is looked up beside the recipe, then in the current folder.
        spec: value of ``task.reward``.

    Raises:
        ConfigError: the value is malformed, the file is missing or cannot be imported, or it has no function that can
            be called with ``(prompt, response)``.
    """
    function = load_object(spec, "task.reward", context.recipe_dir)
    if not callable(function):
        raise ConfigError(f"task.reward is '{spec}', which is {function!r}; it must be a function")
    try:
        inspect.signature(function).bind("prompt", "response")
    except TypeError as error:
        raise ConfigError(f"task.reward {spec} must take (prompt, response): {error}") from error
    except ValueError:
        pass  # a callable without a readable signature fails, if at all, when it is called
    return function
