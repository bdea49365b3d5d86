# SPDX-License-Identifier: Apache-2.0
"""Start `megarl train` as a user does, watch it, and look at what it leaves."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.helpers.processes import describe

ROOT = Path(__file__).parents[2]
RECIPE = """
model: {path: MODEL, dtype: float32}
task: {name: arithmetic, reward: "reward.py:reward", held_out: 2}
parallel: {data: 2}
lora: {r: 4, lora_alpha: 8}
loss: {importance_cap: null}
sampler: {samples_per_prompt: 4, max_prompt_tokens: 96, max_response_tokens: 8, kv_cache_gib: 0.05, max_num_seqs: 16}
train: {steps: 4, prompts_per_step: 2, learning_rate: 0.01, micro_batch_tokens: 256, save_every: 1, keep_checkpoints: 9}
"""
# A random model never answers right: any reward that differs between completions will do.
REWARD = """
def reward(prompt, response):
    return sum(character.islower() for character in response) / 8
"""


class TrainRun:
    """One `megarl train` process and its output."""

    def __init__(self, recipe: Path, *overrides: str) -> None:
        self.log = recipe.with_name(f"log-{time.monotonic_ns()}.txt")
        self._handle = self.log.open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "megarl.cli.main", "train", str(recipe), *overrides],
            stdout=self._handle,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            # Not the log level that a sampler in this process may have set: the run's logs are looked at.
            env={name: value for name, value in os.environ.items() if name != "VLLM_LOGGING_LEVEL"}
            | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "")},
            start_new_session=True,
            # A background job of a shell ignores Ctrl-C, and so would what it starts.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.family: set[psutil.Process] = set()

    def wait_for(self, text: str, timeout: float = 120) -> None:
        """Wait until the output holds a text; remember every process that belongs to the run."""
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
        """The process of the run whose command line holds a text; fails at once where the run has ended."""
        deadline = time.monotonic() + timeout
        while True:
            self.look()
            lines = {p: describe(p) for p in self.family if p.is_running()}
            if found := [p for p, line in lines.items() if title in line]:
                return found[0]
            status = self.process.poll()
            assert status is None, f"the run ended with status {status}:\n{self.output()[-3000:]}"
            listed = "\n".join(sorted(lines.values()))
            assert time.monotonic() < deadline, f"no process {title!r} among\n{listed}\n{self.output()[-3000:]}"
            time.sleep(0.2)

    def finish(self, timeout: float) -> int:
        """Exit status; fails where the process or any process it started outlives the timeout (seconds)."""
        deadline = time.monotonic() + timeout
        status = self.process.wait(timeout)
        while left := [p for p in self.family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
            if time.monotonic() > deadline:
                names = [" ".join(p.cmdline())[:100] for p in left]
                self.kill()
                raise AssertionError(f"still running after {timeout} s: {names}")
            time.sleep(0.2)
        return status

    def kill(self) -> None:
        """End everything, whatever happened."""
        for process in [*self.family, self.process]:
            try:
                process.send_signal(signal.SIGKILL)
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        self._handle.close()

    def output(self) -> str:
        """All that was printed so far."""
        return self.log.read_text()

    def folder(self) -> Path:
        """The run folder, from the last line."""
        return Path(self.output().strip().splitlines()[-1])


def read_rows(folder: Path) -> list[dict]:
    """Rows of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def read_rollout(folder: Path, step: int) -> list[dict]:
    """Completions of one step."""
    return [json.loads(line) for line in (folder / "rollouts" / f"step-{step:06d}.jsonl").read_text().splitlines()]
