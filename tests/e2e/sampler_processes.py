# SPDX-License-Identifier: Apache-2.0
"""Run the scenarios of ``sampler_scenarios`` in processes of their own, a few at a time."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TIMEOUT = 480
NAMES = ("llama", "moe", "qwen3", "merged", "qwen2", "merged_moe")


class Scenarios:
    """Results by name, of processes that start as cores become free; they spend most of their time starting vLLM."""

    def __init__(self, folder: Path, names: tuple[str, ...] = NAMES) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen] = []
        self.pool = ThreadPoolExecutor(os.cpu_count())
        self.results = {name: self.pool.submit(self.run, name) for name in names}

    def run(self, name: str) -> dict[str, Any]:
        """Run a scenario to its end."""
        log, out = self.folder / f"{name}.log", self.folder / f"{name}.json"
        with log.open("w") as handle:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.e2e.sampler_scenarios", name, self.folder / name, out],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
                stdout=handle,
                stderr=subprocess.STDOUT,
            )
            self.processes.append(process)
            code = process.wait(TIMEOUT)
        assert code == 0, log.read_text()[-4000:]
        return json.loads(out.read_text())

    def __getitem__(self, name: str) -> dict[str, Any]:
        return self.results[name].result()

    def close(self) -> None:
        """End the scenarios that still run."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        for process in self.processes:
            process.kill()
