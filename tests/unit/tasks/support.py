# SPDX-License-Identifier: Apache-2.0
"""Helpers that the tests of tasks share."""

from pathlib import Path

from megarl.config import TaskConfig
from megarl.tasks import Task, TaskContext, build_task


def make(recipe_dir: Path | str = ".", seed: int = 0, **config) -> Task:
    """Call ``build_task`` for a ``task`` section given as keywords."""
    return build_task(TaskContext(TaskConfig(**config), Path(recipe_dir), seed))
