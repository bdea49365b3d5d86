# SPDX-License-Identifier: Apache-2.0
"""Train at a layout until one of the run's processes is killed: the sampler agreed, and nothing is left."""

from tests.helpers.processes import find_engine
from tests.helpers.sampled import check_sampled
from tests.helpers.train_run import TrainRun, check_end, make_recipe


def test_merged_weights_of_two_tensor_parallel_ranks_are_sampled_until_the_engine_dies(tmp_path):
    sections = ("parallel.data=1", "parallel.tensor=2", "checkpoint_engine.content=merged")
    sections += ("checkpoint_engine.base_weights=disk",)
    recipe = make_recipe(tmp_path, "qwen3", tied=True)
    run = TrainRun(recipe, f"train.output={tmp_path}", "train.steps=500", *sections)
    try:
        run.wait_for("step 3 ", timeout=240)
        check_end(run, find_engine(run.find("ray::SamplerEngine")), "sampler 0")
    finally:
        run.kill()
    [folder] = tmp_path.glob("arithmetic-*")
    check_sampled(folder, recipe, merge=True)
