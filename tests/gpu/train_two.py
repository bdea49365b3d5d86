# SPDX-License-Identifier: Apache-2.0
"""Run `megarl train` with trainer and engine on a GPU each: in turns, then side by side (`train.max_staleness`).

`python3 -m tests.gpu.train_two FOLDER [SHAPE] [only=KIND] [key=value ...]`: a model of random weights. Prints the
start-up and the seconds of each step's phases, and the asynchronous step against the longer one of sampling and
training. ``only=`` runs one of the two: ``turns`` or ``side``. FOLDER gets the logs of all processes.
"""

import os
import re
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from megarl.bench.random_weights import TMPFS, save_model
from tests.helpers.tokenizer import make_tokenizer
from tests.helpers.train_run import TrainRun, read_rows

RECIPE = """
model: {path: MODEL, dtype: bfloat16}
task: {name: arithmetic, reward: "reward.py:reward"}
lora: {r: 32, lora_alpha: 64}
parallel: {data: 1}
sampler: {engines: 1, share_gpus: false, samples_per_prompt: 8, max_prompt_tokens: 96, max_response_tokens: 256,
  kv_cache_gib: 40, max_num_seqs: 1024}
train: {device: cuda, prompts_per_step: 64, learning_rate: 1.0e-5, micro_batch_tokens: 16384, save_every: 1000}
"""
# Differs between completions of random tokens.
REWARD = """
def reward(prompt, completion):
    return sum(map(int, completion.response_ids)) % 8 / 8
"""
KINDS = {
    "in turns": ["train.steps=6"],
    "side by side": ["train.steps=12", "train.max_staleness=2", "checkpoint_engine.in_flight=overlap"],
}
PHASES = (
    "seconds",
    *(f"seconds/{phase}" for phase in ("sample", "train", "sync", "canary")),
    "sampled_tokens",
    "mismatch_max",
)
# Steps before those that count: side by side the first ones use up what was sampled before the first update.
WARM_UP = {"in turns": 2, "side by side": 5}
# Seconds for a run.
LIMIT = 400


def main(folder: Path, shape: str = "qwen3-0.6b", *given: str) -> None:
    """Run both, and compare them; or one of them."""
    only = {one.removeprefix("only=") for one in given if one.startswith("only=")}
    overrides = [one for one in given if not one.startswith("only=")]
    chosen = {kind: settings for kind, settings in KINDS.items() if not only or only & set(kind.split())}
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0,1")  # the helper hides GPUs from tests otherwise
    device = next((one.partition("=")[2] for one in overrides if one.startswith("train.device=")), "cuda")
    with tempfile.TemporaryDirectory(dir=TMPFS) as scratch:
        model = save_model(shape, Path(scratch), "bfloat16", device, 0)
        make_tokenizer(model)
        recipe = folder / "recipe.yaml"
        recipe.write_text(RECIPE.replace("MODEL", str(model)))
        (folder / "reward.py").write_text(REWARD)
        found = {kind: means(kind, recipe, *settings, *overrides) for kind, settings in chosen.items()}
    for kind, values in found.items():
        print(f"{kind}: means: " + ", ".join(f"{name} {value:.4g}" for name, value in values.items()))
    if len(found) < len(KINDS):
        return
    longer = max(found["in turns"]["seconds/sample"], found["in turns"]["seconds/train"])
    step = found["side by side"]["seconds"]
    print(f"side by side a step takes {step:.2f} s, {step / longer:.2f} of the longer phase in turns ({longer:.2f} s)")


def means(kind: str, recipe: Path, *settings: str) -> dict[str, Any]:
    """Run a recipe; print its start-up and its steps, and return the means of the phases."""
    run = TrainRun(recipe, f"train.output={recipe.parent / kind.replace(' ', '-')}", *settings)
    status = run.finish(LIMIT)
    for log in run.folder().glob("logs/*"):
        shutil.copy(log, recipe.parent / f"{kind.split()[-1]}-{log.name}")
    assert status == 0, f"{kind}: status {status}\n{run.output()[-3000:]}"
    for line in re.findall(r"^(?:start-up:|weights:|transport).*$", run.output(), re.MULTILINE):
        print(f"{kind}: {line}")
    rows = [row for row in read_rows(run.folder()) if row["step"]]
    for row in rows:
        print(f"{kind}: step {row['step']}: " + ", ".join(f"{name} {row.get(name, 0.0):.4g}" for name in PHASES))
    stages = sorted(name for name in rows[-1] if name.startswith(("sync/", "sync_")))
    print(f"{kind}: last sync: " + ", ".join(f"{name} {rows[-1][name]:.4g}" for name in stages), flush=True)
    counted = rows[WARM_UP[kind] :]
    return {name: statistics.mean(row.get(name, 0.0) for row in counted) for name in PHASES}


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
