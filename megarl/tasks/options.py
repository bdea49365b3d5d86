# SPDX-License-Identifier: Apache-2.0
"""What task modules share: their options, checked like the rest of the recipe, and paths relative to it."""

from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from megarl.config import TaskConfig
from megarl.config.base import Section
from megarl.config.explain import explain
from megarl.errors import ConfigError
from megarl.files import find_file, user_path
from megarl.plugins import absolute
from megarl.tasks.base import TaskContext

Options = TypeVar("Options", bound=Section)


def parse_options(context: TaskContext, options: type[Options]) -> Options:
    """Validate ``task.options``.

    Args:
        context: the task's context.
        options: the task's options model, a ``Section``; a validator of it may raise ``ValueError``.

    Raises:
        ConfigError: one line for each wrong field, named as in the recipe (``task.options.max``).
    """
    tree = context.config.options
    try:
        return options.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(explain(error, tree, options, prefix="task.options")) from None


def refuse_path(context: TaskContext) -> None:
    """Raise ``ConfigError`` if ``task.path`` is set: for tasks that make their own prompts."""
    if context.config.path is not None:
        raise ConfigError(
            f"task.path is '{context.config.path}', but task '{context.config.name}' generates its prompts; remove it"
        )


def require_path(context: TaskContext) -> Path:
    """Return the file that ``task.path`` names.

    Raises:
        ConfigError: it is not set, or names no file.
    """
    if context.config.path is None:
        raise ConfigError(f"task.path is required: task '{context.config.name}' reads its rows from a file")
    return find_file("task.path", context.config.path, context.recipe_dir)


def absolute_files(context: TaskContext) -> TaskConfig:
    """The ``task`` section with the files that it names by absolute paths.

    A value that names no file is left as it is: the task refuses it in its own words.

    Raises:
        ConfigError: a path that cannot be.
    """
    config, found = context.config, {"name": absolute(context.config.name, "task.name", context.recipe_dir)}
    if config.path is not None:
        found["path"] = _found(context, "task.path", config.path) or config.path
    if config.reward is not None:
        file, colon, function = config.reward.rpartition(":")
        found["reward"] = f"{_found(context, 'task.reward', file) or file}{colon}{function}"
    return config.model_copy(update=found)


def _found(context: TaskContext, field: str, value: str) -> str | None:
    user_path(field, value)
    try:
        return str(find_file(field, value, context.recipe_dir))
    except ConfigError:
        return None
