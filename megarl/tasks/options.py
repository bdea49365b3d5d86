# SPDX-License-Identifier: Apache-2.0
"""Parse task options and find the files that a task names, for all tasks."""

import os
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from megarl.config import TaskConfig
from megarl.config.base import Section
from megarl.config.explain import explain
from megarl.errors import ConfigError
from megarl.files import find_file, user_path
from megarl.hub import is_hub_id
from megarl.plugins import absolute
from megarl.tasks.base import TaskContext

# Options of registered tasks that name files or folders.
PATHS = {"verifiers": ("python", "folder")}
Options = TypeVar("Options", bound=Section)


def parse_options(context: TaskContext, options: type[Options]) -> Options:
    """Validate ``task.options``.

    Args:
        context: the task's context.
        options: the task's model of its options, a ``Section``. Its validators may raise ``ValueError``.

    Raises:
        ConfigError: some fields are wrong; the message has one line for each, with its name in the recipe
            (``task.options.max``).
    """
    tree = context.config.options
    try:
        return options.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(explain(error, tree, options, prefix="task.options")) from None


def refuse_path(context: TaskContext) -> None:
    """Raise ``ConfigError`` if ``task.path`` is set. For tasks that generate their own prompts."""
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


def require_rows(context: TaskContext) -> Path | None:
    """Return the file or folder that ``task.path`` names; None: it is the id of a data set on the Hugging Face hub.

    Raises:
        ConfigError: it is not set, or is neither.
    """
    if context.config.path is None:
        raise ConfigError(f"task.path is required: task '{context.config.name}' reads its rows from there")
    try:
        return find_file("task.path", context.config.path, context.recipe_dir, or_folder=True)
    except ConfigError:
        if is_hub_id(context.config.path):
            return None
        raise


def absolute_files(context: TaskContext) -> TaskConfig:
    """Return the ``task`` section with absolute paths of the files that it names.

    A value that names no file is left unchanged; the task then refuses it with its own message.

    Raises:
        ConfigError: a path is not valid.
    """
    config, updates = context.config, {"name": absolute(context.config.name, "task.name", context.recipe_dir)}
    if config.path is not None:
        updates["path"] = _absolute_path(context, "task.path", config.path) or config.path
    if config.reward is not None:
        updates["reward"] = absolute(config.reward, "task.reward", context.recipe_dir)
    paths = {name: config.options[name] for name in PATHS.get(config.name, ()) if config.options.get(name)}
    for name, value in paths.items():
        paths[name] = str(absolute_path(f"task.options.{name}", str(value), context.recipe_dir))
    return config.model_copy(update={**updates, "options": {**config.options, **paths}})


def absolute_path(field: str, value: str, folder: Path) -> Path:
    """Return the absolute path of a file or folder that an option names; a link stays a link.

    Raises:
        ConfigError: there is none.
    """
    find_file(field, value, folder, or_folder=True)
    given = Path(value).expanduser()
    return Path(os.path.abspath(folder / given if (folder / given).exists() else given))


def _absolute_path(context: TaskContext, field: str, value: str) -> str | None:
    user_path(field, value)
    try:
        return str(find_file(field, value, context.recipe_dir, or_folder=field == "task.path"))
    except ConfigError:
        return None
