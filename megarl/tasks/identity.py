# SPDX-License-Identifier: Apache-2.0
"""Digests of what a run is trained on, so that a resumed run cannot go on with something else unsaid."""

import hashlib
import json
from collections.abc import Callable, Iterable
from typing import Any

from megarl.config import TaskConfig
from megarl.files import user_path
from megarl.tasks.base import Task
from megarl.tasks.prompting import GENERATED_CHECKED
from megarl.types import Prompt

# Prompts whose token ids are looked at: enough to notice another tokenizer, chat template or system prompt.
TOKENISED = 64


def task_contents(task: Task, config: TaskConfig, encode: Callable[[Prompt], Iterable[int]]) -> dict[str, str | None]:
    """Digests of the prompts, of their token ids and of the reward's source.

    Args:
        task: all its prompts are read where they come from a file, and the first ones where it makes them itself.
        config: ``reward`` names a file by an absolute path.
        encode: prompt -> token ids.

    Returns:
        ``data``, ``tokens``, ``reward``; that is None for the task's own reward.
    """
    count = len(task) if config.path else min(len(task), GENERATED_CHECKED)
    prompts = (task[index] for index in range(count))
    rows = ([prompt.id, [dict(m) for m in prompt.messages], dict(prompt.data)] for prompt in prompts)
    ids = ([int(token) for token in encode(task[index])] for index in range(min(count, TOKENISED)))
    reward = None
    if config.reward:
        file, _, function = config.reward.rpartition(":")
        reward = _digest([[function, user_path("task.reward", file).read_bytes().hex()]])
    return {"data": f"{len(task)} prompts, {_digest(rows)}", "tokens": _digest(ids), "reward": reward}


def _digest(rows: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=repr).encode() + b"\n")
    return digest.hexdigest()
