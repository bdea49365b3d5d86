# SPDX-License-Identifier: Apache-2.0
"""Compare two runs with the same seeds, bit by bit."""

import json
from pathlib import Path
from typing import Any

from tests.helpers.train_run import read_rows

# Parts of the names of metrics that say how long something took, or how much memory it had.
MEASURED = ("second", "sync/", "gib")


def without_times(row: dict[str, Any]) -> dict[str, Any]:
    """Return what must not depend on the speed of the machine."""
    return {name: value for name, value in row.items() if not any(part in name for part in MEASURED)}


def check_same(first: Path, second: Path, steps: int) -> None:
    """Compare metrics, rollouts, evaluations and adapters of the first steps of two runs, whose folders these are."""
    rows = [read_rows(folder)[:steps] for folder in (first, second)]
    assert len(rows[0]) == len(rows[1]) == steps
    for ours, other in zip(*rows, strict=True):
        assert without_times(ours) == without_times(other)
    assert any(row.get("grad_norm") for row in rows[0])
    files = sorted((first / "rollouts").glob("*"))[:steps]
    files += [first / f"checkpoints/step-{steps:06d}/adapter/adapter_model.safetensors"]
    assert len(files) == steps + 1
    for file in files:
        assert file.read_bytes() == (second / file.relative_to(first)).read_bytes(), file.name
    evaluations = [file for file in sorted((first / "evaluations").glob("**/*.jsonl")) if _step_of(file) <= steps]
    assert evaluations
    for file in evaluations:
        lines = [[json.loads(line) for line in (run / file.relative_to(first)).open()] for run in (first, second)]
        assert [without_times(row) for row in lines[0]] == [without_times(row) for row in lines[1]]


def _step_of(file: Path) -> int:
    """Return the step whose policy an evaluation's file is about."""
    [name] = [part for part in file.parts if part.startswith("step-")]
    return int(name.removeprefix("step-"))
