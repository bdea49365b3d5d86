# SPDX-License-Identifier: Apache-2.0
"""Name the files of a run folder, and find its checkpoints, config and adapter. Imports no torch."""

from collections.abc import Sequence
from pathlib import Path

from megarl.config import RunConfig, load_config
from megarl.errors import CheckpointError, ConfigError
from megarl.files import user_path

CONFIG, METRICS, SUMMARY, PLOT = "config.yaml", "metrics.jsonl", "summary.json", "plot.png"
TRACKER_IDS = "trackers.json"
CHECKPOINTS, ROLLOUTS, ADAPTER, TENSORBOARD, LOGS = "checkpoints", "rollouts", "adapter", "tensorboard", "logs"
# Rows, checkpoints and completions of steps that were undone when a run resumed from an earlier step.
DISCARDED_METRICS, DISCARDED = "metrics.discarded.jsonl", "discarded-"
STEP = "step-{:06d}"
# Folder of the evaluations, one folder per step, and the file of an evaluation's results.
EVALUATIONS, RESULTS = "evaluations", "results.json"
# Last file written of a checkpoint, so that a checkpoint that has it is complete.
STATE = "state.json"


def shown(rewards: Sequence[float | None], most: int) -> list[int]:
    """Choose completions of a step that are shown: the first, those of the greatest and the least reward, then others.

    Args:
        rewards: of the completions in the order of their file; None: unknown.
        most: most completions.

    Returns:
        Their places.
    """
    scored = [(reward, place) for place, reward in enumerate(rewards) if reward is not None]
    extremes = [pick(scored, key=lambda one: one[0])[1] for pick in (max, min)] if scored else []
    return list(dict.fromkeys([*range(len(rewards))[:1], *extremes, *range(len(rewards))]))[:most]


def run_prefix(task: str) -> str:
    """Return what the names of a task's run folders begin with; of ``/path/own.py:Echo`` it is ``Echo-``."""
    return f"{task.rpartition(':')[2]}-"


def step_of(checkpoint: Path) -> int:
    """Return the step after which a checkpoint (``STEP``) was saved."""
    return int(checkpoint.name.rpartition("-")[2])


def is_complete(checkpoint: Path) -> bool:
    """Return True if a checkpoint can be resumed: the file that lists its contents is there."""
    return (checkpoint / STATE).is_file()


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a run folder, oldest first."""
    return sorted(filter(is_complete, (folder / CHECKPOINTS).glob("step-*")))


def evaluations(folder: Path) -> dict[int, Path]:
    """Return the results of a run's evaluations: step -> file."""
    files = sorted((folder / EVALUATIONS).glob(f"step-*/{RESULTS}"))
    return {step_of(file.parent): file for file in files if file.parent.name.removeprefix("step-").isdecimal()}


def last_checkpoint(folder: Path) -> Path:
    """Return the newest complete checkpoint.

    Raises:
        CheckpointError: there is none.
    """
    complete = checkpoints(folder)
    if not complete:
        raise CheckpointError(f"train.resume is '{folder}', which holds no complete checkpoint (checkpoints/step-*)")
    return complete[-1]


def saved_config(run: str | Path, field: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Load the config that a run saved, with overrides on top.

    Args:
        run: the run folder, as the user wrote it.
        field: the setting or argument that named it, for the message.
        overrides: see ``load_config``.

    Raises:
        ConfigError: it is not a run folder; see also ``load_config``.
    """
    saved = user_path(field, run) / CONFIG
    if not saved.is_file():
        raise ConfigError(f"{field} is '{run}', which is not a run folder: it holds no {CONFIG}")
    return load_config(saved, overrides)
