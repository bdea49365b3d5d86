# SPDX-License-Identifier: Apache-2.0
"""Build the sets of prompts that a model is evaluated on."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megarl.config import RunConfig, TaskConfig
from megarl.config.sections.eval import HELD_OUT, EvalTaskConfig, Sampling
from megarl.errors import ConfigError, DataError, MegarlError, first_few
from megarl.tasks import TaskContext, build_task
from megarl.tasks.base import Task, is_environment
from megarl.tasks.held_out import last_prompts
from megarl.tasks.options import absolute_files
from megarl.tasks.prompting import check_template_kwargs, encode_prompt
from megarl.types import Prompt


@dataclass(frozen=True)
class EvalSet:
    """A set of prompts, ready to be sampled.

    Attributes:
        config: its entry of ``eval.tasks``.
        sampling: how completions are drawn.
        context: builds the task that scores them; None: the run's own task does.
        prompts: the prompts.
        ids: token ids of each, int64 ``[P]``.
        dropped: number of prompts left out for their length.
        plays: whether the task is an environment.
    """

    config: EvalTaskConfig
    sampling: Sampling
    context: TaskContext | None
    prompts: Sequence[Prompt]
    ids: Sequence[np.ndarray]
    dropped: int = 0
    plays: bool = False

    @property
    def key(self) -> str:
        """Name in the metrics."""
        return self.config.key


def build_sets(
    config: RunConfig,
    recipe_dir: Path,
    tokenizer: Any,
    task: Callable[[], Task],
    entries: Sequence[EvalTaskConfig] | None = None,
) -> list[EvalSet]:
    """Build the sets of a run, and encode their prompts.

    Args:
        config: the run's config.
        recipe_dir: folder of the recipe, to which relative paths refer.
        tokenizer: a Hugging Face tokenizer with a chat template.
        task: function that returns the run's task; called if a set is its held-out prompts.
        entries: the sets to build; None: all that the run is evaluated on.

    Raises:
        ConfigError: wrong options, a missing file, a set without prompts.
        DataError: bad rows, or prompts that are too long.
    """
    sets = []
    for one in config.evaluations if entries is None else entries:
        with _named(one):
            sets.append(_build(one, config, recipe_dir, tokenizer, task))
    return sets


@contextmanager
def _named(one: EvalTaskConfig) -> Iterator[None]:
    """Put the set's name before an error, which names settings of ``task``."""
    try:
        yield
    except MegarlError as error:
        error.args = (f"evaluation '{one.key}': {error}",)
        raise


def _build(
    one: EvalTaskConfig, config: RunConfig, recipe_dir: Path, tokenizer: Any, run_task: Callable[[], Task]
) -> EvalSet:
    context, section = None, config.task
    if one.name == HELD_OUT:
        task = run_task()
        prompts: Sequence[Prompt] = last_prompts(task, config.task.held_out)[: one.limit]
    else:
        section = one.task(config.task)
        context = TaskContext(section, recipe_dir, config.train.seed)
        task = build_task(context)
        prompts = [task[index] for index in range(min(len(task), one.limit or len(task)))]
    if not prompts:
        raise ConfigError("the set has no prompts; check path and options")
    kept, ids = _encoded(prompts, section, tokenizer, config.sampler.max_prompt_tokens)
    return EvalSet(
        one, one.sampling(config.sampler), context, kept, ids, len(prompts) - len(kept), is_environment(task)
    )


def _encoded(
    prompts: Sequence[Prompt], section: TaskConfig, tokenizer: Any, most: int
) -> tuple[list[Prompt], list[np.ndarray]]:
    """Return the prompts that are short enough with their ids; ``task.long_prompts`` decides over the others."""
    check_template_kwargs(tokenizer, section.chat_template_kwargs)
    drops, kept, ids, problems = section.long_prompts == "drop", [], [], []
    for prompt in prompts:
        limit = sys.maxsize if drops else most
        try:
            encoded = encode_prompt(tokenizer, prompt, section.system_prompt, limit, section.chat_template_kwargs)
        except DataError as error:
            problems.append(str(error))
            continue
        if len(encoded) <= most:
            kept.append(prompt)
            ids.append(encoded)
    if problems:
        raise DataError(f"{len(problems)} of {len(prompts)} prompts are bad\n{first_few(problems)}")
    if not kept:
        raise DataError(
            f"task.long_prompts is 'drop', but all {len(prompts)} prompts are longer than sampler.max_prompt_tokens "
            f"({most}); raise that"
        )
    return kept, ids


def with_absolute_files(one: EvalTaskConfig, run: TaskConfig, recipe_dir: Path, seed: int) -> EvalTaskConfig:
    """Return a set's entry with absolute paths of the files that it names."""
    if one.name == HELD_OUT:
        return one
    with _named(one):
        section = absolute_files(TaskContext(one.task(run), recipe_dir, seed))
    # The label stays what it was: a file's name is no part of it.
    return one.model_copy(update={name: getattr(section, name) for name in ("name", "path", "reward")})
