# SPDX-License-Identifier: Apache-2.0
"""Train at a layout while an engine is killed twice: the run goes on once, then it ends, and nothing is left."""

import pytest

from tests.helpers.processes import find_engine, is_engine
from tests.helpers.sampled import check_sampled
from tests.helpers.train_run import TrainRun, check_end, make_recipe, read_rows


@pytest.mark.long
def test_merged_weights_of_two_tensor_parallel_ranks_are_sampled_by_an_engine_and_its_successor(tmp_path):
    sections = ("parallel.data=1", "parallel.tensor=2", "checkpoint_engine.content=merged")
    sections += ("checkpoint_engine.base_weights=disk", "sampler.max_restarts=1")
    recipe = make_recipe(tmp_path, "qwen3", tied=True)
    run = TrainRun(recipe, f"train.output={tmp_path}", "train.steps=500", *sections)
    try:
        run.wait_for("step 2 ", timeout=240)
        find_engine(run.find("ray::SamplerEngine")).kill()
        run.wait_for("sampler 0 is lost and starts again (1 of at most 1, sampler.max_restarts)", timeout=30)
        run.wait_for("sampler 0 holds version", timeout=120)
        step = len(read_rows(next(tmp_path.glob("arithmetic-*")))) + 2
        run.wait_for(f"step {step} ", timeout=60)
        successor = max((p for p in run.family if is_engine(p)), key=lambda process: process.create_time())
        check_end(run, successor, "sampler.max_restarts (1) is used up")
    finally:
        run.kill()
    [folder] = tmp_path.glob("arithmetic-*")
    assert sum(row["engine_restarts"] for row in read_rows(folder)) == 1
    check_sampled(folder, recipe, merge=True)
