# SPDX-License-Identifier: Apache-2.0
"""Stop a process of a real run (SIGSTOP) in each phase: it is named in time, and nothing is left.

One case runs by default. ``MEGARL_STOP_ALL=1 pytest tests/e2e/test_stopped.py`` runs all, some 30 s each on idle cores.
"""

import os
import time
from pathlib import Path

import pytest

from tests.helpers.processes import find_engine
from tests.helpers.train_run import TrainRun, make_recipe

HANG_SECONDS = 6
# For ranks: the method that Ray shows in the process's title.
CASES = {
    "a rank while building": ("rank", "TrainerRank.build"),
    "a rank while training": ("rank", "TrainerRank.update"),
    "a rank while syncing": ("rank", "TrainerRank.send_weights"),
    "a rank while saving": ("rank", "TrainerRank.save_checkpoint"),
    "a rank while the engine samples": ("rank", "ray::TrainerRank "),
    "an engine's process": ("engine", ""),
    "an engine's front end": ("front end", ""),
}
DEFAULT = "a rank while the engine samples"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_recipe(tmp_path_factory.mktemp("stopped"), "qwen3", tied=True)


@pytest.mark.parametrize("case", CASES)
def test_a_stopped_process_is_named_and_everything_ends(recipe: Path, case: str) -> None:
    if case != DEFAULT and not os.environ.get("MEGARL_STOP_ALL"):
        pytest.skip("MEGARL_STOP_ALL=1 runs it")
    who, title = CASES[case]
    settings = (f"train.hang_seconds={HANG_SECONDS}", "train.steps=9999", "sampler.max_response_tokens=90")
    settings += ("train.max_restarts=0", "sampler.max_restarts=0")  # tests.faults has the restarts
    run = TrainRun(recipe, f"train.output={recipe.parent}", *settings)
    try:
        if title != "TrainerRank.build":
            run.wait_for("step 2 ", 240)
        sampler = run.find("ray::SamplerEngine", 120)
        victim = run.find_rank(title) if who == "rank" else sampler if who == "front end" else find_engine(sampler)
        victim.suspend()
        began = time.monotonic()
        assert run.finish(HANG_SECONDS + 30) == 1, run.output()[-3000:]
        assert time.monotonic() - began < HANG_SECONDS + 30
    finally:
        run.kill()
    *_, error, log = run.output().strip().splitlines()
    assert "has given no sign of life for" in error and f"train.hang_seconds is {HANG_SECONDS}" in error
    assert f"its process {victim.pid}" in error and error.endswith("is stopped")
    name = "trainer rank" if who == "rank" else "sampler 0"
    assert log.startswith(f"log of {name}") and Path(log.partition(": ")[2]).is_file()
    folder = max(recipe.parent.glob("arithmetic-*"))
    logs = {file.name: file.read_text() for file in (folder / "logs").iterdir()}
    # An evaluation set has a reward process, and so a log, of its own.
    of_training = sorted(logs.keys() - {"rewards-greedy.log"})
    assert of_training == ["rewards.log", "sampler-0.log", "trainer-rank-0.log", "trainer-rank-1.log"]
    assert "EngineCore" in logs["sampler-0.log"] or title == "TrainerRank.build", "the engine process's output"
