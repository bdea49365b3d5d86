# SPDX-License-Identifier: Apache-2.0
"""Read a run folder for its report. What is missing or damaged is noted, so that the rest can still be shown."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megarl.errors import ConfigError
from megarl.files import user_path
from megarl.report.panels import evaluation_numbers, numbers
from megarl.run_folder import CONFIG, METRICS, ROLLOUTS, SUMMARY, evaluations, shown

LARGEST = 1e100


@dataclass
class RunRecord:
    """The contents of a run folder.

    Attributes:
        label: name of the run on the page.
        folder: the run folder.
        rows: metrics of every step; only finite numbers.
        config: ``section.key`` -> value; empty if the config cannot be read.
        summary: the ``panels.numbers`` of ``summary.json``; empty for a run that has not ended.
        evaluations: step -> ``KEY/METRIC`` -> value.
        rollouts: step -> file of its completions.
        notes: what is missing or damaged.
    """

    label: str
    folder: Path
    rows: list[dict[str, float]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, float] = field(default_factory=dict)
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    rollouts: dict[int, Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_runs(sources: Sequence[str]) -> list[RunRecord]:
    """Read several run folders.

    Args:
        sources: the folders, as the user wrote them.

    Raises:
        ConfigError: one is not a run folder, or is named twice.
    """
    folders: list[Path] = []
    for source in sources:
        folder = user_path("RUN", source).resolve()
        if not any((folder / name).is_file() for name in (CONFIG, METRICS)):
            what = f"it holds neither {CONFIG} nor {METRICS}" if folder.is_dir() else "there is no such folder"
            raise ConfigError(f"RUN is '{source}', which is not a run folder: {what}")
        if folder in folders:
            raise ConfigError(f"RUN '{source}' is named twice; name it once")
        folders.append(folder)
    alike = {folder.name for folder in folders if [other.name for other in folders].count(folder.name) > 1}
    return [read_run(folder, str(folder) if folder.name in alike else folder.name) for folder in folders]


def read_run(folder: Path, label: str) -> RunRecord:
    """Read a run folder."""
    run = RunRecord(label, folder)
    run.rows = _rows(run)
    run.config = _flat(_read(run, CONFIG, yaml.safe_load))
    summary = numbers(_read(run, SUMMARY, json.loads, "the run has not ended"))
    run.summary = _finite(summary)
    run.evaluations = {
        step: _finite(evaluation_numbers(_read(run, str(file.relative_to(folder)), json.loads)))
        for step, file in evaluations(folder).items()
    }
    run.rollouts = _rollouts(run)
    return run


def read_completions(file: Path, most: int) -> tuple[list[dict[str, Any]], str | None]:
    """Return completions of a step, and what is wrong with the file.

    Args:
        file: ``rollouts/step-NNNNNN.jsonl``.
        most: most completions; ``run_folder.shown`` chooses them.
    """
    rows: list[dict[str, Any]] = []
    bad = 0
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                row = _object(line)
                if isinstance(row.get("text"), str) if row else False:
                    rows.append(row)
                else:
                    bad += 1
    except OSError as error:
        return [], f"{file.name} cannot be read: {error.strerror}"
    rewards = [row["reward"] if is_number(row.get("reward")) else None for row in rows]
    return [
        rows[place] for place in shown(rewards, most)
    ], f"{file.name}: {_count(bad)} no completion and left out" if bad else None


def is_number(value: Any) -> bool:
    """Return True for a finite number, of a size that can be drawn."""
    return type(value) in (int, float) and abs(value) <= LARGEST


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if is_number(value)}


def _rows(run: RunRecord) -> list[dict[str, float]]:
    text = _text(run, METRICS, "no step has ended")
    rows: dict[int, dict[str, float]] = {}
    bad: list[int] = []
    for number, line in enumerate(text.splitlines(), start=1):
        row = _object(line)
        if not row or type(row.get("step")) is not int or not is_number(row["step"]):
            bad.append(number)
            continue
        rows[row["step"]] = {str(name): value for name, value in row.items() if is_number(value)}
    if bad:
        run.notes.append(f"{METRICS}: {_count(len(bad))} no row and left out, the first is line {bad[0]}")
    elif text and not rows:
        run.notes.append(f"{METRICS} holds no step")
    return [rows[step] for step in sorted(rows)]


def _count(lines: int) -> str:
    return f"{lines} line is" if lines == 1 else f"{lines} lines are"


def _rollouts(run: RunRecord) -> dict[int, Path]:
    folder = run.folder / ROLLOUTS
    files = {
        int(file.stem.removeprefix("step-")): file
        for file in folder.glob("step-*.jsonl")
        if file.stem.removeprefix("step-").isdecimal()
    }
    if not files:
        run.notes.append(f"{ROLLOUTS}/ holds no completions" if folder.is_dir() else f"there is no {ROLLOUTS}/")
    return dict(sorted(files.items()))


def _read(
    run: RunRecord, name: str, parse: Callable[[str], Any], missing: str | None = "it is missing"
) -> dict[str, Any]:
    """Read a file that holds a mapping; return an empty one, with a note, if that fails."""
    text = _text(run, name, missing)
    if not text:
        return {}
    try:
        tree = parse(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        run.notes.append(f"{name} is damaged: {str(error).splitlines()[0]}")
        return {}
    if not isinstance(tree, Mapping):
        run.notes.append(f"{name} is damaged: it holds no mapping")
        return {}
    return {str(key): value for key, value in tree.items()}


def _text(run: RunRecord, name: str, missing: str | None) -> str:
    try:
        return (run.folder / name).read_bytes().decode("utf-8", "replace")
    except FileNotFoundError:
        if missing is not None:
            run.notes.append(f"there is no {name}: {missing}")
    except OSError as error:
        run.notes.append(f"{name} cannot be read: {error.strerror}")
    return ""


def _object(line: str) -> dict[str, Any]:
    """Return the JSON object on a line, or an empty one."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Map ``section.key`` to values; an inner mapping of a setting stays one value."""
    flat: dict[str, Any] = {}
    for section, fields in tree.items():
        if isinstance(fields, Mapping):
            flat |= {f"{section}.{key}": value for key, value in fields.items()}
        else:
            flat[section] = fields
    return flat
