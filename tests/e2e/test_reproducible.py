# SPDX-License-Identifier: Apache-2.0
"""Run twice with the same seeds: everything but times is the same, bit by bit. In CI, ``test_train`` compares less."""

from pathlib import Path

import pytest

from tests.e2e.same_runs import check_same
from tests.helpers.train_run import TrainRun, make_recipe


@pytest.mark.long
def test_two_runs_are_the_same_bit_by_bit(tmp_path: Path) -> None:
    """They run at the same time, so that each disturbs the other's timing. Both evaluate at the steps 0, 2 and 4."""
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
    check_same(first, second, steps=4)
    [adapter] = (first / "adapter").glob("*.safetensors")
    assert adapter.read_bytes() == (second / adapter.relative_to(first)).read_bytes()
