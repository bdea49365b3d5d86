# SPDX-License-Identifier: Apache-2.0
"""Turn prompts into token ids by the tokenizer's own chat template.

The tokenizer is an argument (a ``transformers.PreTrainedTokenizerBase``), so that nothing heavy is imported.
"""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from megarl.config import TaskConfig
from megarl.errors import ConfigError, DataError, ModelError, first_few, nearest
from megarl.tasks.base import Reward, Task
from megarl.types import Prompt

GENERATED_CHECKED = 256  # number of prompts to check if the task generates them
PROGRESS_FROM = 2_000  # number of prompts from which on a progress bar is shown


# Arguments of ``apply_chat_template`` that megarl sets, or that would change what it returns.
OWNED = (
    "conversation", "add_generation_prompt", "continue_final_message", "tokenize", "padding", "truncation",
    "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "messages",
)  # fmt: skip
# Arguments of ``apply_chat_template`` that are no variables of the template, or are passed on under their own names.
PASSED = ("tools", "documents", "chat_template")


def check_template_kwargs(tokenizer: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuse variables that the chat template would ignore.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        kwargs: ``task.chat_template_kwargs``.

    Raises:
        ConfigError: megarl sets the argument itself, or the template has no such variable.
    """
    words = set(re.findall(r"[A-Za-z_]\w*", str(kwargs.get("chat_template") or tokenizer.chat_template)))
    for name in kwargs:
        if name in OWNED:
            raise ConfigError(f"task.chat_template_kwargs.{name} is set, which megarl sets itself; remove it")
        if name not in words and name not in PASSED:
            raise ConfigError(
                f"task.chat_template_kwargs.{name} is {kwargs[name]!r}, but the model's chat template has no variable "
                f"'{name}'{nearest(name, words)}"
            )


def encode_prompt(
    tokenizer: Any,
    prompt: Prompt,
    system_prompt: str | None,
    max_tokens: int,
    template_kwargs: Mapping[str, Any] | None = None,
) -> np.ndarray:
    """Render a prompt for generation.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        prompt: the prompt; its ``messages`` are rendered, then the header of the assistant's turn.
        system_prompt: text of a system message to put before them, or None.
        max_tokens: the most tokens allowed (``sampler.max_prompt_tokens``).
        template_kwargs: variables for the chat template (``task.chat_template_kwargs``).

    Returns:
        ``[P]`` int64 token ids, 1 <= P <= ``max_tokens``.

    Raises:
        DataError: a prompt is empty, malformed or longer than ``max_tokens``, or the template refuses it.
        ModelError: the tokenizer has no chat template.
    """
    ids = _rendered(tokenizer, prompt, system_prompt, template_kwargs)
    if len(ids) > max_tokens:
        raise DataError(
            f"prompt '{prompt.id}' has {len(ids)} tokens, more than sampler.max_prompt_tokens ({max_tokens}); "
            "raise that, shorten the prompt, or leave such prompts out by task.long_prompts=drop"
        )
    return ids


def _rendered(
    tokenizer: Any, prompt: Prompt, system_prompt: str | None, template_kwargs: Mapping[str, Any] | None
) -> np.ndarray:
    """Return the token ids of a prompt of any length."""
    if not getattr(tokenizer, "chat_template", None):
        raise ModelError(
            "the tokenizer in model.path has no chat template; use an instruction-tuned model, or put a "
            "chat_template.jinja beside its tokenizer.json"
        )
    messages = _messages(prompt, system_prompt)
    try:
        # Without return_dict=False, transformers 5 returns a BatchEncoding.
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False, **(template_kwargs or {})
        )
    except Exception as error:  # a template may raise anything (jinja2's TemplateError, TypeError, ...)
        raise DataError(f"prompt '{prompt.id}': the model's chat template refuses it: {error}") from error
    if len(ids) == 0:
        raise DataError(f"prompt '{prompt.id}' renders to no tokens; check the model's chat template")
    return np.asarray(ids, dtype=np.int64)


def _messages(prompt: Prompt, system_prompt: str | None) -> list[dict[str, str]]:
    """Return the chat for the template, after checking it."""
    messages = [dict(message) for message in prompt.messages]
    if not messages:
        raise DataError(f"prompt '{prompt.id}' is empty: it has no messages")
    for number, message in enumerate(messages, start=1):
        for key in ("role", "content"):
            value = message.get(key)
            if not isinstance(value, str) or not value.strip():
                raise DataError(
                    f"prompt '{prompt.id}', message {number}: '{key}' is {value!r}; it must be a non-empty string"
                )
    if system_prompt is None:
        return messages
    if messages[0]["role"] == "system":
        raise DataError(
            f"prompt '{prompt.id}' begins with a system message and task.system_prompt is set too; remove one of them"
        )
    return [{"role": "system", "content": system_prompt}, *messages]


class Lengths(NamedTuple):
    """Findings of ``check_prompts``.

    Attributes:
        longest: number of tokens of the longest prompt that is kept.
        dropped: indices of the prompts that are too long, ascending; empty unless ``task.long_prompts`` is ``drop``.
    """

    longest: int
    dropped: list[int]


def check_prompts(task: Task, tokenizer: Any, config: TaskConfig, max_tokens: int) -> Lengths:
    """Encode the prompts of a task before anything starts, so that no bad row ends a run half-way.

    If a task reads ``task.path``, or ``task.long_prompts`` is ``drop``, every prompt is encoded; if it generates its
    prompts, 256 of them, evenly spaced.
    From 2,000 prompts on, a progress bar is shown.

    Args:
        task: the task.
        tokenizer: as in ``encode_prompt``.
        config: the ``task`` section; its path and system prompt are used.
        max_tokens: ``sampler.max_prompt_tokens``.

    Raises:
        DataError: some prompts are bad, or every one is too long; the message gives their number and the first few in
            full.
        ModelError: the tokenizer has no chat template.
    """
    drops = config.long_prompts == "drop"
    step = 1 if config.path or drops else max(1, len(task) // GENERATED_CHECKED)
    indices = range(0, len(task), step)
    check_template_kwargs(tokenizer, config.chat_template_kwargs)
    longest, limit = 0, sys.maxsize if drops else max_tokens
    dropped: list[int] = []
    problems: list[str] = []
    for index in _with_progress(indices):
        try:
            ids = encode_prompt(tokenizer, task[index], config.system_prompt, limit, config.chat_template_kwargs)
            if len(ids) > max_tokens:
                dropped.append(index)
            else:
                longest = max(longest, len(ids))
        except DataError as error:
            problems.append(str(error))
    if problems:
        source = config.path or f"task '{config.name}'"
        raise DataError(f"{source}: {len(problems)} of {len(indices)} prompts are bad\n{first_few(problems)}")
    if len(dropped) == len(task):
        raise DataError(
            f"{config.path or config.name}: task.long_prompts is 'drop', but all {len(task)} prompts are longer than "
            f"sampler.max_prompt_tokens ({max_tokens}); raise that"
        )
    return Lengths(longest, dropped)


class ShortPrompts:
    """A task without some of its prompts; the order of the others is kept.

    Attributes:
        dropped: number of prompts left out.
    """

    def __init__(self, task: Task, dropped: Sequence[int]) -> None:
        """
        Args:
            task: the whole task.
            dropped: indices of the prompts to leave out.
        """
        self._task, self.dropped = task, len(dropped)
        self._kept = np.delete(np.arange(len(task)), dropped)

    @property
    def whole(self) -> Task:
        """The whole task."""
        return getattr(self._task, "whole", self._task)

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < len(self):
            raise IndexError(f"prompt {index} of a task with {len(self)} short enough")
        return self._task[int(self._kept[index])]

    def reward(self, prompt: Prompt, response: str) -> Reward:
        """Score like the whole task."""
        return self._task.reward(prompt, response)


def _with_progress(indices: Sequence[int]) -> Iterable[int]:
    if len(indices) < PROGRESS_FROM:
        return indices
    from rich import get_console
    from rich.progress import track

    # Without a terminal, the bar would only leave a blank line in the log.
    return track(indices, description="Checking prompts", transient=True, disable=not get_console().is_terminal)


def without_long(task: Task, tokenizer: Any, config: TaskConfig, max_tokens: int) -> Task:
    """Check a task's prompts, and return it without those that are too long (``task.long_prompts: drop``).

    Arguments and errors as ``check_prompts``.
    """
    dropped = check_prompts(task, tokenizer, config, max_tokens).dropped
    return ShortPrompts(task, dropped) if dropped else task
