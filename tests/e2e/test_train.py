# SPDX-License-Identifier: Apache-2.0
"""Run the whole stack as a user does: `megarl train` with Ray, mcore ranks and vLLM, on a tiny model in fp32."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.e2e.evaluations_of_run import check_evaluations
from tests.e2e.plain_vllm import ask, prompt_logprobs
from tests.e2e.same_runs import check_same
from tests.helpers.sampled import peft_logprobs
from tests.helpers.train_run import TrainRun, make_recipe, read_rollout, read_rows

STEPS = 4


# Written beside the recipe: a tracker that fails at the second step.
TRACKER = """
class Failing:
    def __init__(self, run):
        self.id, self.file = run.config["model.dtype"], open(run.folder / "tracked.txt", "a")

    def log(self, row):
        print(row["step"], file=self.file, flush=True)
        if row["step"] == 2:
            raise OSError("no server")
"""
TRACKERS = "train.trackers=[tensorboard, 'tracker.py:Failing']"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    """Make a tiny model with a tokenizer, an adapter made by PEFT, and a recipe that continues training it."""
    file = make_recipe(tmp_path_factory.mktemp("train"), "qwen3", tied=True)
    (file.parent / "tracker.py").write_text(TRACKER)
    base = AutoModelForCausalLM.from_pretrained(file.parent / "model")
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(base, config).save_pretrained(file.parent / "start")
    text = file.read_text().replace("{r: 4, lora_alpha: 8}", f"{{init_from: {file.parent / 'start'}}}")
    file.write_text(text.replace("max_num_seqs: 16", "max_num_seqs: 16, reproducible: true"))
    return file


@pytest.fixture
def start(recipe):
    """Start runs; at the end of a test none is left."""
    runs = []

    def begin(*overrides: str) -> TrainRun:
        runs.append(TrainRun(recipe, f"train.output={recipe.parent}", TRACKERS, *overrides))
        return runs[-1]

    yield begin
    for run in runs:
        run.kill()


@pytest.fixture(scope="module")
def finished(recipe) -> Path:
    """Return the folder of one complete run."""
    run = TrainRun(recipe, f"train.output={recipe.parent}", TRACKERS)
    try:
        run.wait_for(f"step {STEPS} ", timeout=240)
        assert run.finish(60) == 0, run.output()
        assert run.output().count("gets nothing more of this run, which goes on: OSError: no server") == 1
        assert (run.folder() / "tracked.txt").read_text() == "0\n1\n2\n"
        return run.folder()
    finally:
        run.kill()


def test_run_leaves_what_it_promises(finished):
    for name in (
        "config.yaml",
        "metrics.jsonl",
        "summary.json",
        "plot.png",
        "adapter/adapter_config.json",
        "tensorboard",
    ):
        assert (finished / name).exists(), name
    summary = json.loads((finished / "summary.json").read_text())
    for name in ("reward_first", "reward_last", "mismatch_mean", "mismatch_max", "train_tokens_per_second",
                 "sample_tokens_per_second", "sync_seconds", "seconds", "peak_memory_gib"):  # fmt: skip
        assert np.isfinite(summary[name]), name
    check_evaluations(finished, summary)
    held_out = {"arithmetic-9998", "arithmetic-9999"}
    for step in range(1, STEPS + 1):
        assert not held_out & {row["prompt"] for row in read_rollout(finished, step)}
    rows = read_rows(finished)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all({"sync/transfer", "sync/trainer/export", "sync/receiver/load"} <= row.keys() for row in rows)
    tensors = len(load_file(finished / "adapter" / "adapter_model.safetensors"))
    assert {(row["grad_tensors"], row["adapter_tensors"]) for row in rows if row["grad_norm"]} == {(tensors, tensors)}
    assert summary["grad_tensors"] == summary["adapter_tensors"] == tensors
    assert all(row["reward_min"] <= row["reward"] <= row["reward_max"] for row in rows)
    assert json.loads((finished / "trackers.json").read_text())["/".join((str(finished.parent), "tracker.py:Failing"))]
    assert (finished / "plot.png").read_bytes()[:4] == b"\x89PNG"


def test_sampler_trainer_and_peft_agree_after_every_sync(finished, recipe):
    for row in read_rows(finished):
        assert row["mismatch_max"] <= 1e-4, row
    for step in range(1, STEPS):
        rows = read_rollout(finished, step + 1)
        assert {row["version"] for row in rows} == {step}
        sampled = np.concatenate([row["logprobs"] for row in rows])
        now = peft_logprobs(recipe, finished / "checkpoints" / f"step-{step:06d}" / "adapter", rows)
        assert np.abs(now - sampled).max() <= 1e-4
        compared = [(row, part) for row, part in zip(rows, by_row(now, rows), strict=True) if "pieces" in row]
        assert len(compared) == 4
        for row, part in compared:  # what the report shows of the trainer
            assert np.abs(part - row["trainer_logprobs"]).max() <= 1e-4 and "".join(row["pieces"]) == row["text"]
        if step > 1:
            before = peft_logprobs(recipe, finished / "checkpoints" / f"step-{step - 1:06d}" / "adapter", rows)
            assert np.abs(before - sampled).max() > 1e-3, "the sampler may as well have used the previous version"


def by_row(values, rows):
    """Return the values of the drawn tokens of each row."""
    return np.split(values, np.cumsum([len(row["logprobs"]) for row in rows])[:-1])


def test_an_adapter_made_by_peft_trains_on(finished, recipe):
    rows = read_rollout(finished, 1)
    sampled = np.concatenate([row["logprobs"] for row in rows])
    assert np.abs(peft_logprobs(recipe, recipe.parent / "start", rows) - sampled).max() <= 1e-4
    assert np.abs(peft_logprobs(recipe, None, rows) - sampled).max() > 1e-3


def test_export_gives_pefts_adapter_and_a_model_that_transformers_and_vllm_load(finished, recipe, tmp_path, capsys):
    from megarl.cli.main import main

    assert main(["export", str(finished), "--format", "peft", "--out", str(tmp_path / "peft")]) == 0
    assert main(["export", str(finished), "--format", "merged", "--out", str(tmp_path / "merged")]) == 0
    assert main(["export", str(finished), "--format", "merged", "--out", str(tmp_path / "merged")]) == 2
    assert main(["export", str(tmp_path), "--format", "peft", "--out", str(tmp_path / "other")]) == 2
    # Another model of the same shape replaces the base.
    replaced = shutil.copytree(finished, tmp_path / "replaced")
    settings = (replaced / "config.yaml").read_text()
    (replaced / "config.yaml").write_text(settings.replace(str(recipe.parent / "model"), str(tmp_path / "merged")))
    capsys.readouterr()
    assert main(["export", str(replaced), "--format", "merged", "--out", str(tmp_path / "other")]) == 1
    assert re.search(r"was trained on another model than .*: 'model\.\S+' had other values", capsys.readouterr().err)
    rows = read_rollout(finished, STEPS)
    expected = peft_logprobs(recipe, tmp_path / "peft", rows)
    merged = recipe.parent / "merged-run"
    shutil.copytree(tmp_path / "merged", merged / "model")
    assert np.abs(peft_logprobs(merged / "recipe.yaml", None, rows) - expected).max() <= 1e-4
    answers = prompt_logprobs(tmp_path / "merged", [row["prompt_ids"] + row["response_ids"] for row in rows])
    logprobs = [a[len(row["prompt_ids"]) - 1 :] for a, row in zip(answers, rows, strict=True)]
    assert np.abs(np.concatenate(logprobs) - expected).max() <= 1e-4


def test_eval_repeats_the_runs_own_evaluations_and_serve_answers_with_the_adapter(finished, recipe, tmp_path):
    from megarl.cli.main import main

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (tmp_path / "serve.log").open("w") as log:
        # Started first, so that both start vLLM at the same time.
        server = subprocess.Popen(
            [sys.executable, "-m", "megarl.cli.main", "serve", str(finished), "--port", str(port)],
            stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True,
        )  # fmt: skip
    try:
        out = tmp_path / "eval.json"
        targets = [str(finished), f"{finished}@2", str(recipe.parent / "model")]
        assert main(["eval", *targets, "--json", str(out)]) == 0
        found = json.loads(out.read_text())
        for target, step in zip(targets, (4, 2), strict=False):
            inside = json.loads((finished / "evaluations" / f"step-{step:06d}" / "results.json").read_text())
            assert found[target]["sets"] == inside["sets"], "the engine of `megarl eval` is another policy"
        base, last = (found[target]["sets"]["held_out"]["metrics"]["reward"]["value"] for target in targets[::-2])
        change = found[targets[2]]["difference_to_first"]["held_out"]["reward"]
        assert change["value"] == pytest.approx(base - last) and base != last
        row = read_rollout(finished, STEPS)[0]
        greedy = {
            "max_tokens": 8,
            "temperature": 0,
            "logprobs": 1,
            "return_token_ids": True,
            "prompt": row["prompt_ids"],
        }
        answers = {name: ask(port, server, {"model": name} | greedy) for name in ("adapter", "base")}
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    for name, adapter in (("adapter", finished / "adapter"), ("base", None)):
        said = answers[name]["choices"][0]["logprobs"]
        drawn = {"prompt_ids": row["prompt_ids"], "response_ids": answers[name]["choices"][0]["token_ids"]}
        expected = peft_logprobs(recipe, adapter, [drawn])
        assert np.abs(expected - said["token_logprobs"]).max() <= 1e-4, name


def test_killed_run_resumes_bitwise(finished, recipe, start):
    run = start()
    run.wait_for("step 2 ", timeout=240)
    folder = next(p for p in sorted(recipe.parent.glob("arithmetic-*"), reverse=True) if p != finished)
    deadline = time.monotonic() + 30
    while not (folder / "checkpoints" / "step-000002").exists():  # it is written in the background
        assert time.monotonic() < deadline
        time.sleep(0.01)
    run.process.send_signal(signal.SIGKILL)
    run.finish(30)
    check_same(finished, folder, steps=2)
    # As if the run had died between the second checkpoint and the third: later ones are missing.
    for checkpoint in sorted((folder / "checkpoints").glob("step-*"))[2:]:
        shutil.rmtree(checkpoint)
    resumed = start("train.resume=auto")  # as a job that Slurm queues again
    resumed.wait_for(f"step {STEPS} ", timeout=240)
    assert resumed.finish(60) == 0, resumed.output()
    assert f"resumed at step 2 from {folder}/" in resumed.output()
    assert [row["step"] for row in read_rows(folder)] == list(range(1, STEPS + 1))
    same = ("prompt_ids", "response_ids", "reward", "advantage")
    for step in range(1, STEPS + 1):
        pairs = zip(read_rollout(finished, step), read_rollout(folder, step), strict=True)
        assert all(a[key] == b[key] for a, b in pairs for key in same), f"other completions at step {step}"
    for step in (0, 2, 4):
        results = f"evaluations/step-{step:06d}/results.json"
        assert (finished / results).read_text() == (folder / results).read_text()
    last = f"checkpoints/step-{STEPS:06d}"
    for name in ("optimizer.safetensors", "rng.safetensors", "adapter/adapter_model.safetensors"):
        a, b = load_file(finished / last / name), load_file(folder / last / name)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a), name
    states = [json.loads((f / last / "state.json").read_text()) for f in (finished, folder)]
    assert states[0] == states[1]


# Rewards take until the test has sent its signal, and say that they wait.
SLOW = """
import time
from pathlib import Path

def reward(prompt, response):
    here = Path(__file__).parent
    while (here / "wait").exists():
        (here / "waits").touch()
        time.sleep(0.1)
    return sum(character.islower() for character in response) / 8
"""


def test_sigterm_ends_everything_within_30_seconds_after_a_checkpoint_of_the_last_step(finished, recipe, start):
    (recipe.parent / "slow.py").write_text(SLOW)
    layout = ("parallel.data=1", "parallel.pipeline=2")
    run = start("train.steps=500", "train.save_every=500", *layout, "task.reward=slow.py:reward")
    run.wait_for("step 1 ", timeout=240)
    (recipe.parent / "wait").touch()
    folder = next(p for p in sorted(recipe.parent.glob("arithmetic-*"), reverse=True) if p != finished)
    deadline = time.monotonic() + 120
    while not (recipe.parent / "waits").exists():
        assert time.monotonic() < deadline, run.output()[-2000:]
        time.sleep(0.05)
    rows = read_rows(folder)
    assert max(row["mismatch_max"] for row in rows) <= 1e-4
    # Slurm signals every process, and the launcher signals its job: the second signal must not cut the checkpoint
    # short.
    run.process.send_signal(signal.SIGTERM)
    time.sleep(0.05)
    for number in (signal.SIGTERM, signal.SIGHUP):
        run.process.send_signal(number)
    (recipe.parent / "wait").unlink()
    assert run.finish(30) == 130, run.output()[-2000:]
    # If both arrive before Python looks, it handles the smaller number first.
    assert re.search("interrupted by signal SIG(TERM|HUP)", run.output()[-500:])
    # A row may be written after the next step has begun.
    named = re.search(rf"go on after step (\d+): megarl resume {re.escape(str(folder))}\n", run.output()[-1000:])
    assert named, run.output()[-1000:]
    assert "A worker died" not in run.output(), "Ray's report of an actor that it was told to kill"
    steps = int(named[1])
    assert len(rows) <= steps == len(read_rows(folder))
    assert run.output().index(f"run folder: {folder}\n") < run.output().index("lora:")
    saved = json.loads((folder / "checkpoints" / f"step-{steps:06d}" / "state.json").read_text())
    assert saved["extra"]["step"] == saved["extra"]["updates"] == steps
    # The cursor equals that of a checkpoint of a run that went on: the drawn prompts come again.
    other = json.loads((finished / "checkpoints" / f"step-{steps:06d}" / "state.json").read_text())
    for extra in (saved["extra"], other["extra"]):
        del extra["run"]  # its settings differ
    assert saved["extra"] == other["extra"]
