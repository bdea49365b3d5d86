# SPDX-License-Identifier: Apache-2.0
"""Run `megarl bench train`: measure the contenders one after the other, each in its own process, and compare them."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megarl.bench.flops import work_per_token
from megarl.bench.settings import BenchSettings, model_config
from megarl.errors import WorkerError
from megarl.folder_lock import FolderLock

GEMM = "gemm"
LORA = ("te", "local", "peft")


def bench_train(
    settings: BenchSettings,
    out: Path,
    *,
    profile: bool,
    graph: bool = False,
    report: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure every contender. A failed one does not stop the others.

    Args:
        settings: what to measure.
        out: folder for each contender's log, result and profile.
        profile: True to profile a step of each contender.
        graph: True to write the graph of a layer of ``local``'s, ``graph-local.py`` in ``out``.
        report: called with a line before and after each contender.

    Returns:
        ``settings``, ``gemm_tflops``, ``work`` (operations per token) and ``contenders``. Each contender has the
        derived ``gemm_share``, ``over_peft``, ``memory_over_peft`` and ``lora_over_full`` if both sides ran.

    Raises:
        WorkerError: no contender succeeded.
        CheckpointError: another bench writes to ``out``; each would read the other's results.
    """
    out.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(out)
    try:
        report(f"{GEMM}: the ceiling, one large matrix product")
        gemm = run_contender(GEMM, settings, out)
        results = []
        names = _runnable(settings)
        for number, name in enumerate(names, start=1):
            steps = f"builds, {settings.warmup} steps to warm up, {settings.steps} timed"
            report(f"{name} ({number} of {len(names)}): {steps}; log: {out / name}.log")
            flags = [flag for flag, is_set in (("profile", profile), ("graph", graph and name == "local")) if is_set]
            results.append(run_contender(name, settings, out, flags))
            report(f"{name}: {_outcome(results[-1])}")
    finally:
        lock.release()
    if all("error" in result for result in results):
        raise WorkerError(f"bench: every contender failed; see {out}: {results[0]['error']}")
    return compare(settings, gemm.get("tflops"), results)


def _outcome(result: dict[str, Any]) -> str:
    return result.get("error") or f"{result['tokens_per_second']:,.0f} tokens/s"


def _runnable(settings: BenchSettings) -> list[str]:
    """Return the contenders, without ``te`` if its package is not installed or if layers are to be compiled."""
    missing = settings.compile or importlib.util.find_spec("transformer_engine") is None
    return [name for name in settings.contenders if not (name == "te" and missing)]


def run_contender(name: str, settings: BenchSettings, out: Path, flags: Sequence[str] = ()) -> dict[str, Any]:
    """Run one contender in a process and read its result. If it failed, ``error`` holds its last line of output."""
    result, log = out / f"{name}.json", out / f"{name}.log"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "megarl.bench.contender", name, settings.model_dump_json(), str(out)]
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} | os.environ
    with log.open("w") as handle:
        code = subprocess.run([*command, *flags], stdout=handle, stderr=subprocess.STDOUT, env=environment).returncode
    if code == 0 and result.is_file():
        return json.loads(result.read_text())
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return {"name": name, "error": lines[-1] if lines else f"exit status {code}"}


def compare(settings: BenchSettings, gemm_tflops: float | None, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Add the numbers that compare several contenders."""
    work = work_per_token(
        model_config(settings.model), rank=settings.r, length=settings.length, response=settings.response
    )
    succeeded = {result["name"]: result for result in results if "error" not in result}
    for name, result in succeeded.items():
        operations = work.full if name == "full" else work.lora
        result["gemm_share"] = (
            operations * result["tokens_per_second"] / 1e12 / gemm_tflops if gemm_tflops is not None else None
        )
        if "peft" in succeeded and name != "peft":
            result["over_peft"] = result["tokens_per_second"] / succeeded["peft"]["tokens_per_second"]
            result["memory_over_peft"] = result["peak_gib"] / succeeded["peft"]["peak_gib"]
        full = succeeded.get("full")
        if full is not None and name in LORA and result["backend"] == full["backend"]:
            result["lora_over_full"] = _ratio(result, full)
    return {
        "settings": settings.model_dump(),
        "gemm_tflops": gemm_tflops,
        "work": vars(work),
        "contenders": results,
    }


def _ratio(lora: dict[str, Any], full: dict[str, Any]) -> float:
    """Return how much faster the LoRA step is. If the full step has no optimizer, LoRA's is subtracted."""
    if full["optimizer"]:
        return full["step_ms"] / lora["step_ms"]
    return full["step_ms"] / (lora["step_ms"] - lora["phases"]["optimizer"])
