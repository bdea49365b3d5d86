# SPDX-License-Identifier: Apache-2.0
"""Measure one contender in its own process: `python -m megarl.bench.contender NAME SETTINGS FOLDER [profile] [graph]`.

Each contender gets a process, because memory that its allocator or compiler holds must not count for the next one.
"""

import importlib.util
import json
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from megarl.bench.clock import Clock
from megarl.bench.profile import write_profile
from megarl.bench.settings import BenchSettings, Contender

GEMM = "gemm"


class Step(Protocol):
    """Interface of a contender."""

    device: torch.device
    info: dict[str, Any]

    def step(self, clock: Clock) -> None: ...

    def logprobs(self) -> None: ...


def build(name: Contender, settings: BenchSettings) -> Step:
    """Make a contender. Imports only what it needs."""
    if name == "peft":
        from megarl.bench.peft_step import PeftStep

        return PeftStep(settings)
    if name == "full":
        from megarl.bench.full_step import FullStep

        return FullStep(settings, "te" if has_te() and not settings.compile else "local")
    from megarl.bench.megarl_step import MegarlStep

    return MegarlStep(settings, name)


def has_te() -> bool:
    """Return True if the ``te`` back end can run here."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def measure(name: Contender, settings: BenchSettings, folder: Path, flags: Collection[str] = ()) -> dict[str, Any]:
    """Warm up and measure; with the flag ``profile`` profile a step, with ``graph`` write a layer's graph.

    Returns:
        ``tokens_per_second`` of whole steps, ``phases`` in milliseconds, ``peak_gib`` and more.
    """
    began = time.perf_counter()
    contender = build(name, settings)
    clock = Clock(contender.device)
    for _ in range(settings.warmup):
        clock.time(lambda: contender.step(clock))
    ready = time.perf_counter() - began
    clock.clear()
    for _ in range(settings.steps):
        clock.time(lambda: contender.step(clock))
    phases, peak = clock.medians(), clock.peak_gib()
    total = phases.pop("total")
    passes = Clock(contender.device)
    for _ in range(3):
        passes.time(contender.logprobs)
    result = {
        "name": name,
        "tokens_per_second": settings.tokens / total * 1e3,
        "step_ms": total,
        "phases": phases,
        "logprob_pass_ms": passes.medians()["total"],
        "peak_gib": peak,
        **contender.info,
        "seconds_until_ready": ready,
        "torch": torch.__version__,
    }
    if "profile" in flags:
        file = folder / f"profile-{name}.txt"
        result["device_ms"] = write_profile(lambda: contender.step(clock), contender.device, file)
    if "graph" in flags:
        from megarl.bench.joint_graph import write_graph

        write_graph(cast(Any, contender).chunks, lambda: contender.step(clock), folder / f"graph-{name}.py")
    return result


def measure_gemm(settings: BenchSettings) -> dict[str, Any]:
    """Measure the ceiling: TFLOP/s of one large square matrix product in the measured dtype."""
    on_cuda = settings.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda" if on_cuda else "cpu")
    size, products = (8192, 20) if on_cuda else (512, 1)
    left, right = (torch.randn(size, size, device=device, dtype=getattr(torch, settings.dtype)) for _ in range(2))
    clock = Clock(device)

    def multiply() -> None:
        for _ in range(products):
            torch.mm(left, right)

    for repeat in range(10):
        if repeat == 3:
            clock.clear()
        clock.time(multiply)
    return {"name": GEMM, "size": size, "tflops": 2 * products * size**3 / clock.medians()["total"] / 1e9}


def main(name: str, settings_json: str, folder: str, *flags: str) -> None:
    """Measure, and write the result into the folder."""
    settings = BenchSettings.model_validate_json(settings_json)
    given: Any = name
    result = measure_gemm(settings) if name == GEMM else measure(given, settings, Path(folder), flags)
    (Path(folder) / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
