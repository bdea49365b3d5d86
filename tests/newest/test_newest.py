# SPDX-License-Identifier: Apache-2.0
"""Run megarl on the newest megatron-core: exact at layouts, the plugin, checkpoints of either release, a training.

Whole matrices: `PYTHONPATH=$(bash scripts/mcore.sh) megarl verify MODEL --matrix`.
"""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.architectures import write_model
from tests.helpers.models import make_model
from tests.helpers.sampled import check_sampled
from tests.helpers.train_run import TrainRun, check_end, make_recipe
from tests.newest import programs
from tests.newest.conftest import ROOT


def run_on(environment: dict[str, str], *program: str) -> str:
    """Return the standard output of `python *program`."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *program],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=540,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def release_of(environment: dict[str, str]) -> str:
    return run_on(environment, "-c", "import megatron.core as core; print(core.__shortversion__)").strip()


@pytest.fixture(scope="module")
def on_newest(newest, tmp_path_factory):
    """Return what one process on the newest release printed, and the folder of both releases' checkpoints."""
    folder = tmp_path_factory.mktemp("newest")
    for saver in ("installed", "newest"):
        for family in programs.SAVED:
            make_model(folder / saver / family / "model", family, tied=family == "qwen3")
    programs.save(str(folder / "installed"))
    said = run_on(newest, "-m", "tests.newest.programs", str(folder))
    programs.load(str(folder / "newest"))
    return said, folder


def test_layouts_equal_one_process_of_hugging_face_and_peft(newest, on_newest):
    said, _ = on_newest
    assert f"{len(programs.DENSE + programs.EXPERTS + programs.LATENT)} places, worst" in said
    assert said.endswith(f"megatron-core {release_of(newest)}\n")


@pytest.mark.long
def test_more_layouts_equal_it_too(newest):
    assert f"{sum(map(len, programs.MORE))} places, worst" in run_on(newest, "-m", "tests.newest.programs")


@pytest.mark.long
def test_models_of_transformers_pass_every_row(newest, tmp_path):
    model = write_model(tmp_path / "model", "gemma3_text", vocab_size=131)
    settings = ("model.backend=transformers", "model.dtype=float32", "lora.r=4")
    said = run_on(newest, "-m", "megarl.cli.main", "verify", str(model), *settings)
    assert said.count(" yes ") == 13, said


@pytest.mark.long
def test_the_plugin_trains_an_adapter_that_peft_reproduces(newest):
    tests = "tests/distributed/test_plugin.py"
    # The README's commands start what the other tests of the file call, a minute of torchrun without another result.
    without = ("--deselect", f"{tests}::test_the_readmes_commands_run_as_written")
    said = run_on(newest, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", tests, *without)
    assert " passed" in said and "skipped" not in said, said


@pytest.mark.parametrize("saver", ["newest", "installed"])
def test_a_checkpoint_of_one_release_goes_on_in_the_other(newest, on_newest, saver):
    for family in programs.SAVED:
        folder = on_newest[1] / saver / family
        state = json.loads((folder / "checkpoint" / "state.json").read_text())
        assert (state["megatron_core"] == release_of(newest)) is (saver == "newest")
        straight, resumed = (torch.load(folder / name, weights_only=True) for name in ("straight.pt", "resumed.pt"))
        for a, b in zip(straight, resumed, strict=True):
            assert a["state"].keys() == b["state"].keys()
            different = [name for name in a["state"] if not torch.equal(a["state"][name], b["state"][name])]
            assert not different, (family, different[:5])


@pytest.mark.long
def test_experts_over_two_ranks_train_with_a_sampler_that_agrees_until_one_rank_dies(
    newest_or_installed, tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", newest_or_installed["PYTHONPATH"])
    recipe = make_recipe(tmp_path, "qwen3_moe", tied=False)
    run = TrainRun(recipe, f"train.output={tmp_path}", "parallel.expert=2", "train.steps=500", "train.max_restarts=0")
    try:
        run.wait_for("step 3 ", timeout=420)
        check_end(run, run.find("ray::TrainerRank"), "trainer rank")
    finally:
        run.kill()
    [folder] = tmp_path.glob("arithmetic-*")
    check_sampled(folder, recipe)
    adapter = folder / "checkpoints/step-000002/adapter"
    adapted = load_file(adapter / "adapter_model.safetensors")
    for name in ("mlp.gate", "mlp.experts.0.up_proj", "mlp.experts.3.down_proj"):
        assert adapted[f"base_model.model.model.layers.3.{name}.lora_B.weight"].any(), f"{name} was not trained"
    state = json.loads((adapter.parent / "state.json").read_text())
    assert state["megatron_core"] == release_of(newest_or_installed)
