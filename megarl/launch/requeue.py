# SPDX-License-Identifier: Apache-2.0
"""``train.resume=auto``: a job that is started again goes on with the run that it left."""

from pathlib import Path

from megarl.config import RunConfig, load_config
from megarl.config.train import AUTO
from megarl.errors import MegarlError
from megarl.files import user_path
from megarl.run_folder import CONFIG, SUMMARY, checkpoints


def find_run(config: RunConfig) -> RunConfig:
    """Replace ``train.resume: auto`` by the run folder to continue, or by None.

    That folder lies below ``train.output``, holds a complete checkpoint and no summary (the run has not finished), and
    its settings are these. Of several the newest one is taken.

    Args:
        config: with absolute paths, as ``config.yaml`` of a run folder has them.
    """
    if config.train.resume != AUTO:
        return config
    wanted = with_resume(config, None)
    parent = user_path("train.output", config.train.output).resolve()
    found = [folder for folder in parent.glob(f"{config.task.name}-*") if can_continue(folder, wanted)]
    newest = max(found, key=lambda folder: (checkpoints(folder)[-1].stat().st_mtime, folder.name), default=None)
    return with_resume(config, str(newest) if newest else None)


def can_continue(folder: Path, wanted: RunConfig) -> bool:
    """Whether a folder holds an unfinished run with a checkpoint and the settings ``wanted``."""
    if (folder / SUMMARY).exists() or not checkpoints(folder):
        return False
    try:
        # Parsed, not compared as text: a setting that is new since then has its default in both.
        return load_config(folder / CONFIG) == wanted
    except MegarlError:
        return False


def with_resume(config: RunConfig, folder: str | None) -> RunConfig:
    """The same run with another ``train.resume``."""
    return config.model_copy(update={"train": config.train.model_copy(update={"resume": folder})})
