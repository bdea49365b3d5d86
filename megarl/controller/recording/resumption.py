# SPDX-License-Identifier: Apache-2.0
"""Find the checkpoint that a resumed run continues from, and check everything before anything is written."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.config import RunConfig
from megarl.config.resume import check_changes
from megarl.errors import CheckpointError
from megarl.files import append_line, discard, write_text, writing
from megarl.model.checkpoint.digests import verify
from megarl.run_folder import (
    ADAPTER,
    CHECKPOINTS,
    DISCARDED,
    DISCARDED_METRICS,
    METRICS,
    PLOT,
    ROLLOUTS,
    STEP,
    SUMMARY,
    checkpoints,
    evaluations,
    last_checkpoint,
    step_of,
)


@dataclass(frozen=True)
class Resumption:
    """The state that a resumed run continues from. All of it has been read and checked; nothing has been written.

    Attributes:
        folder: the run folder.
        checkpoint: the checkpoint to load.
        step: step of the checkpoint.
        rows: metrics up to that step.
        later: lines of the metrics file after that step.
        changed: settings that differ from the run's, as ``train.resume_changes`` allows.
        notes: messages for the user.
    """

    folder: Path
    checkpoint: Path
    step: int
    rows: list[dict[str, Any]]
    later: list[str]
    changed: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    @property
    def other_data(self) -> bool:
        """True if the prompts, or their order, differ from the run's."""
        return bool(self.changed & {"task.name", "task.path", "task.options", "task.held_out"})

    def apply(self) -> None:
        """Set aside everything later than the checkpoint: the folder is then as it was when it was saved.

        Raises:
            CheckpointError: the folder cannot be written.
        """
        with writing(self.folder):
            for checkpoint in sorted((self.folder / CHECKPOINTS).glob("step-*")):
                if checkpoint.name > self.checkpoint.name:
                    _set_aside(checkpoint)
            for rollout in (self.folder / ROLLOUTS).glob("step-*.jsonl"):
                if rollout.stem > STEP.format(self.step):
                    _set_aside(rollout)
            for step, results in evaluations(self.folder).items():
                if step > self.step:
                    _set_aside(results.parent)
            # A run that was complete is not any more, and its last adapter is that of its last checkpoint.
            for name in (ADAPTER, SUMMARY, PLOT):
                if (self.folder / name).exists():
                    _set_aside(self.folder / name)
            for line in self.later:
                append_line(self.folder / DISCARDED_METRICS, line)
            write_text(self.folder / METRICS, "".join(json.dumps(row) + "\n" for row in self.rows))


def _set_aside(path: Path) -> None:
    """Rename a file or folder to ``DISCARDED`` and its name; one of that name is replaced."""
    aside = path.with_name(DISCARDED + path.name)
    if aside.is_dir():
        discard(aside)
    path.replace(aside)


def find_resumption(folder: Path, config: RunConfig, contents: Mapping[str, Any]) -> Resumption:
    """Choose the checkpoint to continue from, and check it, the settings and the metrics against each other.

    Args:
        folder: the run folder.
        config: config of the resumed run.
        contents: as for ``check_changes``.

    Raises:
        CheckpointError: no checkpoint, a damaged one (the message names the newest intact one before it), or damaged
            metrics.
        ConfigError: a setting, the data or the reward differs from the run's.
    """
    checkpoint, extra = _choose(folder, config.train.resume_step)
    changed = check_changes(extra["run"], contents, config)
    rows, later, notes = _read_metrics(folder / METRICS, extra["step"])
    if later:
        notes.append(f"metrics of {len(later)} later steps are moved to {DISCARDED_METRICS}")
    if changed:
        notes.append(f"changed as train.resume_changes asks: {', '.join(sorted(changed))}")
    return Resumption(folder, checkpoint, extra["step"], rows, later, changed, notes)


def find_last(folder: Path, config: RunConfig, contents: Mapping[str, Any]) -> Resumption:
    """Return the state of the newest complete checkpoint that the session itself goes back to, or of step 0.

    Args, Raises:
        See ``find_resumption``.
    """
    if checkpoints(folder):
        config = config.model_copy(update={"train": config.train.model_copy(update={"resume_step": None})})
        return find_resumption(folder, config, contents)
    rows, later, _ = _read_metrics(folder / METRICS, 0)
    return Resumption(folder, folder / CHECKPOINTS / STEP.format(0), 0, rows, later)


def _choose(folder: Path, step: int | None) -> tuple[Path, dict[str, Any]]:
    """Return the checkpoint of a step, or the newest one, with the controller's state in it."""
    complete = checkpoints(folder)
    if step is None:
        chosen = last_checkpoint(folder)
    else:
        chosen = folder / CHECKPOINTS / STEP.format(step)
        if chosen not in complete:
            held = ", ".join(str(step_of(path)) for path in complete) or "none"
            raise CheckpointError(
                f"train.resume_step is {step}, but '{folder}' has complete checkpoints of steps: {held}"
            )
    try:
        return chosen, _controller_state(chosen)
    except CheckpointError as error:
        for older in reversed([path for path in complete if path < chosen]):
            try:
                intact = _controller_state(older)["step"]
            except CheckpointError:
                continue
            raise CheckpointError(
                f"{error}; the newest intact one before it is '{older.name}': go back to it with "
                f"train.resume_step={intact}"
            ) from error
        raise CheckpointError(f"{error}; no checkpoint before it is intact") from error


def _controller_state(checkpoint: Path) -> dict[str, Any]:
    """Read the loop's state from a checkpoint, after comparing the whole checkpoint with its digests."""
    extra = verify(checkpoint)["extra"]
    if not isinstance(extra, dict) or not {"step", "updates", "stream", "run"} <= extra.keys():
        raise CheckpointError(f"checkpoint '{checkpoint}' was not saved by `megarl train`: its state lacks the run's")
    if checkpoint.name != STEP.format(extra["step"]):
        raise CheckpointError(
            f"checkpoint '{checkpoint}' is damaged: it holds step {extra['step']}; give it back its own name"
        )
    return extra


def _read_metrics(file: Path, step: int) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """Return the rows up to a step, the lines after it, and notes. An incomplete last line is left out."""
    notes: list[str] = []
    try:
        lines = file.read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], [], [f"'{file}' is gone: the metrics begin at step {step + 1}"]
    except OSError as error:
        raise CheckpointError(f"'{file}' cannot be read: {error.strerror}") from error
    hint = f"mend it, or move the file away to go on without the rows up to step {step}"
    rows: list[dict[str, Any]] = []
    later: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line:
            if number < len(lines):
                raise CheckpointError(f"'{file}', line {number} is empty; {hint}")
            continue
        row = _row(line)
        if isinstance(row, str):
            if number < len(lines) or not (rows or later):
                raise CheckpointError(f"'{file}', line {number} is not a row of metrics ({row}); {hint}")
            notes.append(f"'{file}' ended in half a line, which is left out")
            continue
        expected = rows[-1]["step"] + 1 if rows else row["step"]
        if row["step"] > step:
            later.append(line.decode())
        elif row["step"] != expected or later:
            raise CheckpointError(f"'{file}', line {number} is of step {row['step']}, expected is {expected}; {hint}")
        else:
            rows.append(row)
    if rows and rows[-1]["step"] != step:
        raise CheckpointError(
            f"'{file}' ends at step {rows[-1]['step']}, before the checkpoint's step {step}: rows are missing; {hint}"
        )
    if not rows:  # the file was moved away before an earlier resume
        notes.append(f"'{file}' holds no rows up to step {step}")
    return rows, later, notes


def _row(line: bytes) -> dict[str, Any] | str:
    """Return a row of metrics, or the reason why the line is not one."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return str(error)
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return "it has no integer 'step'"
    if bad := [name for name, value in row.items() if type(value) not in (int, float)]:
        return f"'{bad[0]}' is {row[bad[0]]!r}; it must be a number"
    return row
