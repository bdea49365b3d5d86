# SPDX-License-Identifier: Apache-2.0
"""Digest the prompts and the reward of a run, so that a resumed run cannot silently continue with others."""

import hashlib
import json
from collections.abc import Callable, Iterable
from typing import Any

from megarl.config import TaskConfig
from megarl.plugins import source_of
from megarl.tasks.base import Task
from megarl.tasks.prompting import GENERATED_CHECKED
from megarl.types import Prompt

# Number of prompts whose token ids are digested: enough to notice another tokenizer, chat template or system prompt.
TOKENISED = 64


def task_contents(task: Task, config: TaskConfig, encode: Callable[[Prompt], Iterable[int]]) -> dict[str, str | None]:
    """Return digests of the prompts, of their token ids and of the reward's source.

    Args:
        task: all prompts are read if they come from a file, only the first ones if the task generates them.
        config: the ``task`` section; ``reward`` has the absolute path of its file.
        encode: function: prompt -> token ids.

    Returns:
        ``data``, ``tokens``, ``reward``. ``reward`` is None for the task's own reward.
    """
    count = len(task) if config.path else min(len(task), GENERATED_CHECKED)
    prompts = (task[index] for index in range(count))
    rows = ([prompt.id, [dict(m) for m in prompt.messages], dict(prompt.data)] for prompt in prompts)
    ids = ([int(token) for token in encode(task[index])] for index in range(min(count, TOKENISED)))
    reward = None
    if config.reward:
        function = config.reward.rpartition(":")[2]
        reward = _digest([[function, source_of(config.reward, "task.reward").hex()]])
    return {"data": f"{len(task)} prompts, {_digest(rows)}", "tokens": _digest(ids), "reward": reward}


def _digest(rows: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=repr).encode() + b"\n")
    return digest.hexdigest()
