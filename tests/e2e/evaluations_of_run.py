# SPDX-License-Identifier: Apache-2.0
"""Check the evaluations of a run's folder against the completions in it."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.train_run import read_rows


def check_evaluations(folder: Path, summary: dict) -> None:
    """Check that versions 0, 2 and 4 were evaluated on both sets, and the numbers against the completions."""
    rows = {row["step"]: row for row in read_rows(folder)}
    assert sorted(path.name for path in (folder / "evaluations").iterdir()) == [f"step-{n:06d}" for n in (0, 2, 4)]
    for step in (0, 2, 4):
        file = folder / "evaluations" / f"step-{step:06d}"
        measured = json.loads((file / "results.json").read_text())
        assert (measured["step"], measured["version"]) == (step, step)
        held_out = [json.loads(line) for line in (file / "held_out.jsonl").read_text().splitlines()]
        assert [row["prompt"] for row in held_out] == ["arithmetic-9998"] * 4 + ["arithmetic-9999"] * 4
        assert {row["version"] for row in held_out} == {step}
        assert all(len(row["response_ids"]) <= 8 for row in held_out)
        greedy = [json.loads(line) for line in (file / "greedy.jsonl").read_text().splitlines()]
        assert (len(greedy), max(len(row["response_ids"]) for row in greedy)) == (3, 12)
        reward = measured["sets"]["held_out"]["metrics"]["reward"]
        assert reward["value"] == pytest.approx(np.mean([row["reward"] for row in held_out]))
        assert reward["low"] <= reward["value"] <= reward["high"]
        assert measured["sets"]["greedy"]["metrics"]["pass@1"]["value"] == 0.0
        if step:
            assert rows[step]["eval/held_out/reward"] == reward["value"] and rows[step]["seconds/eval"] > 0
    assert not [name for step in (1, 3) for name in rows[step] if name.startswith("eval/")]
    for when in ("before", "after"):
        assert 0.0 < summary[f"eval_{when}"]["held_out/reward"] <= 1.0
    assert summary["eval_after"]["held_out/reward"] == rows[4]["eval/held_out/reward"]
