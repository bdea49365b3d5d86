# SPDX-License-Identifier: Apache-2.0
"""Read what the steps of a run took."""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PHASES = ("sample", "train", "sync", "canary")
# Begin of the names of a sync's metrics.
SYNC = ("sync/", "sync_")
# Of a row, what a report keeps beside them.
KEPT = ("step", "seconds", *(f"seconds/{phase}" for phase in PHASES), "sampled_tokens", "mismatch_max")


def rows_of(file: Path) -> list[dict[str, Any]]:
    """Return the steps in a metrics.jsonl so far; the run may be writing it."""
    rows = [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [_kept(row) for row in rows if row["step"]]


def measured(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what steps took, on average.

    Returns:
        ``step_seconds``; ``phase_seconds``: phase -> seconds, 0 where a step has none; ``tokens_per_second``, sampled;
        ``mismatch_max`` of all steps; ``sync``: the metrics of the last sync.
    """
    seconds = [row["seconds"] for row in rows]
    return {
        "step_seconds": statistics.mean(seconds),
        "phase_seconds": {phase: statistics.mean(row.get(f"seconds/{phase}", 0.0) for row in rows) for phase in PHASES},
        "tokens_per_second": sum(row["sampled_tokens"] for row in rows) / sum(seconds),
        "mismatch_max": max(row.get("mismatch_max", 0.0) for row in rows),
        "sync": {name: value for name, value in rows[-1].items() if name.startswith(SYNC)},
    }


def of_longer_phase(ways: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Return a step side by side as a multiple of the longer of sampling and training in turns; None if one lacks."""
    if not {"turns", "side"} <= ways.keys():
        return None
    phases = ways["turns"]["phase_seconds"]
    return ways["side"]["step_seconds"] / max(phases["sample"], phases["train"])


def _kept(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name in KEPT or name.startswith(SYNC)}
