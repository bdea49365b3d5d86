# SPDX-License-Identifier: Apache-2.0
"""Digest what must not have changed when a run is resumed."""

import hashlib
from pathlib import Path
from typing import Any

from megarl.config import RunConfig
from megarl.errors import AdapterError
from megarl.tasks.base import Task
from megarl.tasks.identity import task_contents


def contents_of(config: RunConfig, task: Task, encode: Any) -> dict[str, str | None]:
    """Digest what the settings name: prompts, their tokens, the reward, the initial adapter.

    Raises:
        AdapterError: ``lora.init_from`` cannot be read.
    """
    contents = task_contents(task, config.task, encode) | {"adapter": None}
    if config.lora.init_from:
        digest = hashlib.sha256()
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            file = Path(config.lora.init_from) / name
            try:
                digest.update(file.read_bytes())
            except OSError as error:
                raise AdapterError(f"lora.init_from: {file} cannot be read: {error.strerror}") from error
        contents["adapter"] = digest.hexdigest()
    return contents
