# SPDX-License-Identifier: Apache-2.0
"""Sync many versions into one engine: memory stays flat, nothing is left behind, no key or value is stale.

Every prompt begins with the same long prefix, whose keys and values vLLM caches. Those of another version would give
other logprobs. In the last rounds all versions get one name in vLLM's cache, and the comparison must then fail.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import psutil

from megarl.checkpoint_engine.transports.shm_folders import ROOT
from megarl.sampler.drawing import requests
from tests.e2e.sampler_rig import LORA, PeftTrainer, Rig, make_model, prompts, run_config
from tests.helpers.processes import find_engine

SYNCS, COMPARED = 200, 20
# Versions before memory is first measured: caches fill.
WARM_UP = 20
PREFIX = 64
AGREEMENT, STALE = 1e-4, 1e-1
GROWTH_MIB = 24.0
TRANSPORTS = ("shm", "gloo", "ipc")


class Row(NamedTuple):
    """The traces of ``SYNCS`` versions that came by one transport.

    Attributes:
        transport: its name.
        error: largest |difference| of logprobs from PEFT's, of versions with a cached prefix.
        stale_error: the same with one name for all versions; it must be large, or the test would notice nothing.
        growth_mib: how much the engine grew after the warm-up, and the trainer.
        base_same: whether the base's checksums are what they were.
        left: names in /dev/shm after all was closed.
        milliseconds: mean of a sync.
    """

    transport: str
    error: float
    stale_error: float
    growth_mib: tuple[float, float]
    base_same: bool
    left: tuple[str, ...]
    milliseconds: float

    @property
    def problem(self) -> str:
        """The first thing that is wrong; empty if nothing is."""
        checks = {
            "logprobs differ from PEFT's": self.error < AGREEMENT,
            "a stale cache would not be noticed": self.stale_error > STALE,
            "memory grows": max(self.growth_mib) < GROWTH_MIB,
            "the base changed": self.base_same,
            "files are left": not self.left,
        }
        return next((name for name, good in checks.items() if not good), "")


def rows(words: list[str]) -> Iterator[Row]:
    """Yield a row for each transport whose name is among the words, or all."""
    for transport in TRANSPORTS:
        if not words or transport in words:
            with tempfile.TemporaryDirectory(prefix="megarl-soak-") as folder:
                yield _soak(transport, Path(folder) / "model")


def _soak(transport: str, folder: Path) -> Row:
    make_model("llama", folder)
    trainer = PeftTrainer(folder, LORA)
    rig = Rig(run_config(folder, checkpoint_engine={"transport": transport}), trainer)
    try:
        rig.manager.sync(0, "base")
        before = rig.call(rig.sampler._link.engine().compute_weight_checksums())
        random = np.random.default_rng(0)
        shared = random.integers(10, 300, PREFIX)
        engine, sizes, seconds, errors = find_engine(psutil.Process()), [], [], []
        for version in range(SYNCS):
            trainer.randomise(version)
            seconds.append(sum(rig.manager.sync(version, "adapter").seconds.values()))
            answers = rig.generate(with_prefix(shared, version), version)
            if version % (SYNCS // COMPARED) == 0:
                errors.append(rig.error(answers))
            if version in (WARM_UP, SYNCS - 1):
                sizes.append((private_mib(engine), private_mib(psutil.Process())))
        after = rig.call(rig.sampler._link.engine().compute_weight_checksums())
        stale = stale_error(rig, shared)
    finally:
        rig.call(rig.sampler.close())
        rig.call(close(rig))
    growth = (sizes[1][0] - sizes[0][0], sizes[1][1] - sizes[0][1])
    left = tuple(sorted(path.name for path in ROOT.glob("*megarl*")))
    return Row(transport, max(errors), stale, growth, before == after, left, 1e3 * float(np.mean(seconds)))


def with_prefix(shared: np.ndarray, seed: int) -> list[np.ndarray]:
    """Return two prompts that begin alike."""
    return [np.concatenate([shared, prompt[:20]]) for prompt in prompts(2, seed=seed)]


def stale_error(rig: Rig, shared: np.ndarray) -> float:
    """Return the error when all versions have one name in vLLM's cache."""
    made = requests._lora_request

    def unnamed(version: int) -> Any:
        request = made(version)
        request.lora_name = "policy"
        return request

    errors = []
    with mock.patch.object(requests, "_lora_request", unnamed):
        for version in range(SYNCS, SYNCS + 3):
            rig.trainer.randomise(version)
            rig.manager.sync(version, "adapter")
            errors.append(rig.error(rig.generate(with_prefix(shared, version), version)))
    return max(errors)


async def close(rig: Rig) -> None:
    """Close the trainer's end of the transport."""
    rig.trainer.finish_sync()


def private_mib(process: psutil.Process) -> float:
    """Return the memory that only a process has, MiB."""
    return process.memory_full_info().uss / 2**20


def table(found: list[Row]) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| transport | PEFT - sampler | one cache name | engine grew, MiB | trainer grew, MiB | sync, ms | problem |",
        "| --- | --: | --: | --: | --: | --: | --- |",
    ]
    for row in found:
        growth = " | ".join(f"{mib:.1f}" for mib in row.growth_mib)
        lines.append(
            f"| {row.transport} | {row.error:.1e} | {row.stale_error:.2f} | {growth} | {row.milliseconds:.0f} | "
            f"{row.problem} |"
        )
    return "\n".join(lines)
