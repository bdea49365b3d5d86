# SPDX-License-Identifier: Apache-2.0
"""Measure one contender of `megarl bench train`, in each of its ranks.

`python -m megarl.bench.training.contender NAME LABEL SETTINGS FOLDER [profile] [graph]`

Each contender gets processes of its own, because memory that its allocator or compiler holds must not count for the
next one. ``ranks`` starts them.
"""

import importlib.util
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from megarl.bench.files import file_of
from megarl.bench.training.clock import Clock
from megarl.bench.training.profile import write_profile
from megarl.bench.training.settings import BenchSettings, Contender

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
        from megarl.bench.training.peft_step import PeftStep

        return PeftStep(settings)
    if name == "full":
        from megarl.bench.training.full_step import FullStep

        return FullStep(settings, "te" if has_te() else "local")
    from megarl.bench.training.megarl_step import MegarlStep

    return MegarlStep(settings, "local", name) if name == "bitwise" else MegarlStep(settings, name)


def has_te() -> bool:
    """Return True if the ``te`` back end can run here."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def measure(
    name: Contender, label: str, settings: BenchSettings, folder: Path, flags: Collection[str] = ()
) -> dict[str, Any]:
    """Warm up and measure; with the flag ``profile`` profile a step, with ``graph`` write a layer's graph. Collective.

    Returns:
        ``tokens_per_second`` of whole steps over all ranks, this rank's ``phases`` in milliseconds, ``peak_gib`` of the
        rank that needs most, and more.
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
        "ranks": settings.world_size,
        "tokens_per_second": settings.tokens / total * 1e3,
        "step_ms": total,
        "phases": phases,
        "logprob_pass_ms": passes.medians()["total"],
        "peak_gib": _largest(peak),
        **contender.info,
        "seconds_until_ready": ready,
        "torch": torch.__version__,
    }
    rank = int(os.environ["RANK"])
    if "profile" in flags:
        file = file_of(folder, f"profile-{label}", rank, "txt")
        result["device_ms"] = write_profile(lambda: contender.step(clock), contender.device, file)
    if "graph" in flags:
        from megarl.bench.training.joint_graph import write_graph

        file = file_of(folder, f"graph-{label}", rank, "py")
        write_graph(cast(Any, contender).chunks, lambda: contender.step(clock), file)
    return result


def _largest(peak: float) -> float:
    """Return the largest of all ranks' numbers."""
    if not dist.is_initialized():
        return peak
    peaks = [peak] * dist.get_world_size()
    dist.all_gather_object(peaks, peak)
    return max(peaks)


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


def main(name: str, label: str, settings_json: str, folder: str, *flags: str) -> None:
    """Measure; rank 0 writes the result into the folder."""
    settings = BenchSettings.model_validate_json(settings_json)
    given: Any = name
    result = measure_gemm(settings) if name == GEMM else measure(given, label, settings, Path(folder), flags)
    if os.environ["RANK"] == "0":
        file_of(Path(folder), label, 0, "json").write_text(json.dumps(result, indent=1) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()


def _end_with_parent(parent: int) -> None:
    """End this process when its parent is gone, also while it waits for another rank."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    try:
        main(*sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        # At once: with a peer gone, the end of a process group may wait for it.
        os._exit(1)
