# SPDX-License-Identifier: Apache-2.0
"""Start `megarl train` as a user does, watch it, and read what it leaves."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from megarl.bench.character_tokenizer import make_tokenizer
from tests.helpers.models import make_model
from tests.helpers.processes import describe, is_alive

ROOT = Path(__file__).parents[2]
RECIPE = """
model: {path: MODEL, dtype: float32}
task: {name: arithmetic, reward: "reward.py:reward", held_out: 2}
parallel: {data: 2}
lora: {r: 4, lora_alpha: 8}
loss: {importance_cap: null}
sampler: {samples_per_prompt: 4, max_prompt_tokens: 96, max_response_tokens: 8, kv_cache_gib: 0.05, max_num_seqs: 16}
train: {steps: 4, prompts_per_step: 2, learning_rate: 0.01, micro_batch_tokens: 256, save_every: 1, keep_checkpoints: 9,
  eval_every: 2}
eval:
  tasks:
  - {name: arithmetic, label: greedy, options: {min: 30, max: 60}, limit: 3, samples: 1, temperature: 0,
     max_response_tokens: 12, metrics: [pass@1, maj@1]}
"""
# A random model never answers correctly, so any reward that differs between completions is used.
REWARD = """
def reward(prompt, response):
    return sum(character.islower() for character in response) / 8
"""


def make_recipe(folder: Path, family: str, *, tied: bool) -> Path:
    """Make a tiny model of a family with a tokenizer, and a recipe for it."""
    model = make_model(folder / "model", family, tied=tied, vocab_size=100, head_dim=32, eos_token_id=0)
    assert make_tokenizer(model) == 100
    file = folder / "recipe.yaml"
    file.write_text(RECIPE.replace("MODEL", str(model)).replace("loss: {", 'loss: {name: "loss.py:OwnLoss", '))
    (folder / "reward.py").write_text(REWARD)
    # The user's own loss. It computes the same as a registered one.
    (folder / "loss.py").write_text("from megarl.loss.grpo import GrpoLoss as OwnLoss\n")
    return file


class TrainRun:
    """One `megarl train` (or ``resume``) process and its output."""

    def __init__(self, recipe: Path, *overrides: str, command: str = "train", before: tuple[str, ...] = ()) -> None:
        """
        Args:
            recipe: the recipe; for ``resume`` the run folder.
            overrides: settings.
            command: of `megarl`.
            before: command that runs the process.
        """
        self.log = recipe.with_name(f"log-{time.monotonic_ns()}.txt")
        self._handle = self.log.open("w")
        self.process = subprocess.Popen(
            [*before, sys.executable, "-m", "megarl.cli.main", command, str(recipe), *overrides],
            stdout=self._handle,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            # Without the log level that a sampler in this process may have set, because tests read the run's logs.
            env={name: value for name, value in os.environ.items() if name != "VLLM_LOGGING_LEVEL"}
            | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "")},
            start_new_session=True,
            # A shell's background job ignores Ctrl-C, and its children would inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.family: set[psutil.Process] = set()

    def wait_for(self, text: str, timeout: float = 120) -> None:
        """Wait until the output holds a text. Remember every process that belongs to the run."""
        deadline = time.monotonic() + timeout
        while text not in self.output():
            assert self.process.poll() is None, self.output()[-3000:]
            assert time.monotonic() < deadline, f"no {text!r} within {timeout} s:\n{self.output()[-3000:]}"
            self.look()
            time.sleep(0.2)
        self.look()

    def look(self) -> None:
        """Collect the processes of the run."""
        try:
            self.family |= set(psutil.Process(self.process.pid).children(recursive=True))
        except psutil.NoSuchProcess:
            return

    def find(self, title: str, timeout: float = 30) -> psutil.Process:
        """Return the run's process whose command line holds a text. Fails at once if the run has ended."""
        deadline = time.monotonic() + timeout
        while True:
            self.look()
            lines = {p: describe(p) for p in self.family if p.is_running()}
            if titled := [p for p, line in lines.items() if title in line]:
                return titled[0]
            status = self.process.poll()
            assert status is None, f"the run ended with status {status}:\n{self.output()[-3000:]}"
            listed = "\n".join(sorted(lines.values()))
            assert time.monotonic() < deadline, f"no process {title!r} among\n{listed}\n{self.output()[-3000:]}"
            time.sleep(0.2)

    def find_rank(self, title: str) -> psutil.Process:
        """Return rank 0 or 1 while its process has this title; Ray shows the method that it runs."""
        ranks: list[psutil.Process] = []
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline:
            if len(ranks) < 2:
                self.look()
                ranks = [p for p in self.family if p.is_running() and "ray::TrainerRank" in describe(p)]
            for rank in ranks:
                if title in f"{describe(rank).rstrip()} ":
                    return rank
            time.sleep(0.002)
        raise AssertionError(f"no {title}:\n{self.output()[-2000:]}")

    def finish(self, timeout: float) -> int:
        """Return the exit status. Fails if the process, or one that it started, outlives the timeout (seconds)."""
        deadline = time.monotonic() + timeout
        status = self.process.wait(timeout)
        while remaining := [process for process in self.family if is_alive(process)]:
            if time.monotonic() > deadline:
                names = [" ".join(p.cmdline())[:100] for p in remaining]
                self.kill()
                raise AssertionError(f"still running after {timeout} s: {names}")
            time.sleep(0.2)
        return status

    def kill(self) -> None:
        """Kill everything, whatever happened."""
        for process in [*self.family, self.process]:
            try:
                process.send_signal(signal.SIGKILL)
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        self._handle.close()

    def output(self) -> str:
        """Return the output so far."""
        return self.log.read_text()

    def folder(self) -> Path:
        """Return the run folder, from the last line of output."""
        return Path(self.output().strip().splitlines()[-1])


def read_rows(folder: Path) -> list[dict]:
    """Return the rows of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def read_rollout(folder: Path, step: int) -> list[dict]:
    """Return the completions of one step."""
    return [json.loads(line) for line in (folder / "rollouts" / f"step-{step:06d}.jsonl").read_text().splitlines()]


def check_end(run: TrainRun, victim: psutil.Process, message: str) -> None:
    """Kill a process of a run: all of it ends within 30 s, with the cause on the last screen."""
    began = time.monotonic()
    victim.kill()
    assert run.finish(30) == 1, run.output()[-2000:]
    assert time.monotonic() - began < 30
    assert message in run.output()[-2500:], run.output()[-2500:]
    assert "Traceback" not in run.output()[-600:]
