# SPDX-License-Identifier: Apache-2.0
"""Train asynchronously with a real engine: versions within the bound, kill -9, resume without a lost prompt."""

import signal
from pathlib import Path

import numpy as np
import pytest

from megarl.config import load_config
from megarl.controller.rollouts.data import PromptStream
from megarl.tasks import TaskContext, build_task
from megarl.tasks.held_out import training_part
from tests.helpers.train_run import TrainRun, make_recipe, read_rollout, read_rows

STEPS, STALENESS, PROMPTS = 10, 2, 2
SETTINGS = (
    f"train.max_staleness={STALENESS}",
    f"train.steps={STEPS}",
    f"train.prompts_per_step={PROMPTS}",
    "train.save_every=2",
    "train.learning_rate=1e-3",
    "loss.importance_cap=2.0",
    "checkpoint_engine.in_flight=continue",
    "sampler.max_response_tokens=64",
    "sampler.max_prompt_tokens=96",
)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    """Return the folder of a run that was killed after step 4 and resumed."""
    recipe = make_recipe(tmp_path_factory.mktemp("async"), "qwen3", tied=True)
    first = TrainRun(recipe, f"train.output={recipe.parent}", *SETTINGS)
    try:
        first.wait_for("step 5 ", timeout=240)
        first.process.send_signal(signal.SIGKILL)
        first.finish(60)
    finally:
        first.kill()
    [folder] = {path.parent for path in recipe.parent.glob("*/metrics.jsonl")}
    second = TrainRun(recipe, *SETTINGS, f"train.resume={folder}")
    try:
        second.wait_for(f"step {STEPS} ", timeout=240)
        assert second.finish(60) == 0, second.output()
        assert second.folder() == folder
    finally:
        second.kill()
    return folder


def test_tokens_are_of_several_versions_within_the_bound(run_folder: Path) -> None:
    rows = read_rows(run_folder)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert 0 < max(row["staleness_max"] for row in rows) <= STALENESS
    for row in rows:
        for one in read_rollout(run_folder, row["step"]):
            assert row["version"] - 1 - STALENESS <= one["version"] <= one["last_version"] <= row["version"] - 1
    assert max(row["canary"] for row in rows) < 1e-5


def test_no_prompt_is_lost_or_trained_twice_across_the_kill(run_folder: Path) -> None:
    prompts = [{one["prompt"] for one in read_rollout(run_folder, step)} for step in range(1, STEPS + 1)]
    assert [len(step) for step in prompts] == [PROMPTS] * STEPS
    assert set().union(*prompts) == first_prompts(run_folder, PROMPTS * STEPS)


def first_prompts(run_folder: Path, count: int) -> set[str]:
    """Return the ids of the first prompts of the run's stream."""
    config = load_config(run_folder / "config.yaml")
    task = build_task(TaskContext(config.task, run_folder, config.train.seed))
    training = training_part(task, config.task.held_out)
    stream = PromptStream(training, lambda prompt: np.zeros(1, dtype=np.int64), config.train.seed)
    return {prompt.prompt.id for prompt in stream.next(count)}
