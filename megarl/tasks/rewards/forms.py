# SPDX-License-Identifier: Apache-2.0
"""Read the form of a reward function: the name of its second parameter says what it takes; it may be async."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.errors import RewardError
from megarl.types import DecodedCompletion

# Names of the second parameter. Any other name is given what ``response`` is.
RESPONSE, COMPLETION, RESPONSES, COMPLETIONS = "response", "completion", "responses", "completions"


@dataclass(frozen=True)
class RewardForm:
    """The form of a reward function, which decides how it is called.

    Attributes:
        takes: ``"response"`` (the decoded text), ``"completion"`` (a ``DecodedCompletion``), or their plurals: a list
            with one entry for each completion of the prompt.
        is_async: the function is an ``async def``.
    """

    takes: str = RESPONSE
    is_async: bool = False

    @property
    def is_group(self) -> bool:
        """True if one call scores all completions of a prompt."""
        return self.takes in (RESPONSES, COMPLETIONS)

    def given(self, completions: Sequence[DecodedCompletion]) -> list[Any]:
        """Return the second argument of each call that scores ``completions``, which belong to one prompt."""
        each = [item.text for item in completions] if self.takes in (RESPONSE, RESPONSES) else list(completions)
        return [each] if self.is_group else each


def form_of(function: Callable[..., Any]) -> RewardForm:
    """Read the form off a function's signature; a callable without a readable one takes ``(prompt, response)``."""
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return RewardForm(is_async=is_async)
    takes = names[1] if len(names) > 1 and names[1] in (COMPLETION, RESPONSES, COMPLETIONS) else RESPONSE
    return RewardForm(takes, is_async)


def form_of_task(task: Any) -> RewardForm:
    """Return the form of a task's reward: its attribute ``reward_form``, or that of its method ``reward``."""
    form = getattr(task, "reward_form", None)
    return form if isinstance(form, RewardForm) else form_of(task.reward)


def one_for_each(verdicts: Any, count: int, said: str) -> list[Any]:
    """Return what a group's reward gave as a list.

    Args:
        verdicts: what the function returned.
        count: number of completions that it was given.
        said: function and prompt, for the message.

    Raises:
        RewardError: it is not a sequence with one entry for each completion.
    """
    if isinstance(verdicts, str | Mapping) or not isinstance(verdicts, Sequence | np.ndarray):
        raise RewardError(
            f"{said} returned {verdicts!r} ({type(verdicts).__name__}); it was given {count} completions: return a "
            f"list of {count}, one verdict for each"
        )
    if np.ndim(verdicts) == 0 or len(verdicts) != count:
        raise RewardError(
            f"{said} returned {np.size(verdicts)} verdicts for {count} completions: {verdicts!r}; return a list of "
            f"{count}, one verdict for each"
        )
    return list(verdicts)
