# SPDX-License-Identifier: Apache-2.0
"""Train at a layout until one of the run's processes is killed: the sampler agreed, and nothing is left."""

import time

import psutil
from safetensors.torch import load_file

from tests.helpers.processes import find_engine
from tests.helpers.sampled import check_sampled
from tests.helpers.train_run import TrainRun, make_recipe


def check_end(run: TrainRun, victim: psutil.Process, message: str) -> None:
    """Kill a process of a run: all of it ends within 30 s, with the cause on the last screen."""
    began = time.monotonic()
    victim.kill()
    assert run.finish(30) == 1, run.output()[-2000:]
    assert time.monotonic() - began < 30
    assert message in run.output()[-2500:], run.output()[-2500:]
    assert "Traceback" not in run.output()[-600:]


def test_experts_over_two_ranks_train_with_a_sampler_that_agrees_until_one_rank_dies(tmp_path):
    recipe = make_recipe(tmp_path, "qwen3_moe", tied=False)
    run = TrainRun(recipe, f"train.output={tmp_path}", "parallel.expert=2", "train.steps=500")
    try:
        run.wait_for("step 3 ", timeout=240)
        check_end(run, run.find("ray::TrainerRank"), "trainer rank")
    finally:
        run.kill()
    [folder] = tmp_path.glob("arithmetic-*")
    check_sampled(folder, recipe)
    adapter = folder / "checkpoints/step-000002/adapter"
    adapted = load_file(adapter / "adapter_model.safetensors")
    for name in ("mlp.gate", "mlp.experts.0.up_proj", "mlp.experts.3.down_proj"):
        assert adapted[f"base_model.model.model.layers.3.{name}.lora_B.weight"].any(), f"{name} was not trained"


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
