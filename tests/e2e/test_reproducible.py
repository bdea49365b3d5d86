# SPDX-License-Identifier: Apache-2.0
"""Run twice with the same seeds: everything but times is the same, bit by bit."""

import json
from pathlib import Path
from typing import Any

from tests.helpers.train_run import TrainRun, make_recipe, read_rows

# Parts of the names of metrics that say how long something took, or how much memory it had.
MEASURED = ("second", "sync/", "gib")


def without_times(row: dict[str, Any]) -> dict[str, Any]:
    """Return what must not depend on the speed of the machine."""
    return {name: value for name, value in row.items() if not any(part in name for part in MEASURED)}


def test_two_runs_are_the_same_bit_by_bit(tmp_path: Path) -> None:
    """They run at the same time, so that each disturbs the other's timing. Both evaluate twice."""
    recipe = make_recipe(tmp_path, "qwen3", tied=True)
    runs = []
    try:
        for name in ("a", "b"):
            settings = (f"train.output={tmp_path / name}", "sampler.reproducible=true", "parallel.data=1")
            runs.append(TrainRun(recipe, *settings))
        for run in runs:
            run.wait_for("step 4 ", timeout=400)
            assert run.finish(90) == 0, run.output()
    finally:
        for run in runs:
            run.kill()
    first, second = (run.folder() for run in runs)
    for ours, other in zip(read_rows(first), read_rows(second), strict=True):
        assert without_times(ours) == without_times(other)
    assert any(row.get("grad_norm") for row in read_rows(first))
    files = sorted((first / "rollouts").glob("*")) + sorted((first / "adapter").glob("*.safetensors"))
    assert len(files) >= 5
    for file in files:
        assert file.read_bytes() == (second / file.relative_to(first)).read_bytes(), file.name
    evaluations = sorted((first / "evaluations").glob("**/*.jsonl"))
    assert evaluations
    for file in evaluations:
        lines = [[json.loads(line) for line in (run / file.relative_to(first)).open()] for run in (first, second)]
        assert [without_times(row) for row in lines[0]] == [without_times(row) for row in lines[1]]
