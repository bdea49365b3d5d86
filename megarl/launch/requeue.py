# SPDX-License-Identifier: Apache-2.0
"""Resolve ``train.resume=auto``: a job that is started again continues its unfinished run."""

from pathlib import Path

from megarl.config import RunConfig, load_config
from megarl.config.sections.train import AUTO
from megarl.errors import MegarlError
from megarl.files import user_path
from megarl.run_folder import CONFIG, SUMMARY, checkpoints, run_prefix


def find_run(config: RunConfig) -> RunConfig:
    """Replace ``train.resume: auto`` by the run folder to continue, or by None.

    The folder must be below ``train.output``, hold a complete checkpoint and no summary (the run is unfinished), and
    have the same settings. The newest such folder is taken.

    Args:
        config: the config with absolute paths, as in the ``config.yaml`` of a run folder.
    """
    if config.train.resume != AUTO:
        return config
    wanted = with_resume(config, None)
    parent = user_path("train.output", config.train.output).resolve()
    runs = [folder for folder in parent.glob(f"{run_prefix(config.task.name)}*") if can_continue(folder, wanted)]
    newest = max(runs, key=lambda folder: (checkpoints(folder)[-1].stat().st_mtime, folder.name), default=None)
    return with_resume(config, str(newest) if newest else None)


def can_continue(folder: Path, wanted: RunConfig) -> bool:
    """Return True if a folder holds an unfinished run with a checkpoint and the settings ``wanted``."""
    if (folder / SUMMARY).exists() or not checkpoints(folder):
        return False
    try:
        # Parsed instead of compared as text: a setting that was added since has its default in both.
        return load_config(folder / CONFIG) == wanted
    except MegarlError:
        return False


def with_resume(config: RunConfig, folder: str | None) -> RunConfig:
    """Return the config with another ``train.resume``."""
    return config.model_copy(update={"train": config.train.model_copy(update={"resume": folder})})
