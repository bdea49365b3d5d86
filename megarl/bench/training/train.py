# SPDX-License-Identifier: Apache-2.0
"""Run `megarl bench train`: measure the contenders one after the other, each in its own process, and compare them."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl.bench.settings import model_config
from megarl.bench.training.flops import work_per_token
from megarl.bench.training.ranks import check_gpus, run_contender
from megarl.bench.training.settings import BenchSettings
from megarl.config import ModelConfig
from megarl.config.back_ends import MEGATRON_AXES
from megarl.config.numerics import BITWISE, check_trainer_numerics
from megarl.errors import ConfigError, UnsupportedError, WorkerError
from megarl.families import family_of
from megarl.folder_lock import FolderLock

GEMM, PEFT = "gemm", "peft"
LORA = ("te", "local", BITWISE, PEFT)


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
        out: folder for each contender's logs, results and profiles.
        profile: True to profile a step of each contender.
        graph: True to write the graph of a layer of ``local``'s, ``graph-local.py`` in ``out``.
        report: called with a line before and after each contender.

    Returns:
        ``settings``, ``batch`` (sequences of a step), ``gemm_tflops``, ``work`` (operations per token), ``left_out``
        (contender -> reason) and ``contenders``. Each contender has the derived ``gemm_share``, ``over_peft``,
        ``memory_over_peft``, ``lora_over_full`` and ``over_fast`` (the time of a step of ``bitwise``, of ``local``'s)
        if both sides ran. At a layout of several ranks it has ``one_rank``, its result there, and ``speed_up`` and
        ``efficiency``.

    Raises:
        ConfigError: there are too few GPUs, or every contender is left out.
        WorkerError: no contender succeeded.
        CheckpointError: another bench writes to ``out``; each would read the other's results.
    """
    check_gpus(settings.world_size, settings.device, f"the layout ({layout_of(settings)})")
    without = left_out(settings)
    names = [name for name in settings.contenders if name not in without]
    if not names:
        raise ConfigError(f"bench: no contender is left: {'; '.join(without.values())}")
    out.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(out)
    try:
        for name, reason in without.items():
            report(f"{name} is left out: {reason}")
        report(f"{GEMM}: the ceiling, one large matrix product")
        gemm = run_contender(GEMM, settings.alone(), out)
        results = []
        for number, name in enumerate(names, start=1):
            here = settings.alone() if name == PEFT else settings
            ranks = f" on {here.world_size} ranks" if here.world_size > 1 else ""
            steps = f"builds, {settings.warmup} steps to warm up, {settings.steps} timed"
            report(f"{name} ({number} of {len(names)}){ranks}: {steps}; log: {out / name}.log")
            flags = [flag for flag, is_set in (("profile", profile), ("graph", graph and name == "local")) if is_set]
            results.append(run_contender(name, here, out, flags))
            report(f"{name}: {_outcome(results[-1])}")
            if here.world_size > 1 and settings.one_rank:
                results[-1]["one_rank"] = run_contender(name, settings.alone(), out, label=f"{name}-one-rank")
                report(f"{name} on one rank: {_outcome(results[-1]['one_rank'])}")
    finally:
        lock.release()
    if all("error" in result for result in results):
        raise WorkerError(f"bench: every contender failed; see {out}: {results[0]['error']}")
    return compare(settings, gemm.get("tflops"), results) | {"left_out": without}


def layout_of(settings: BenchSettings) -> str:
    """Return the axes that are split, or "one rank"."""
    axes = [(axis, getattr(settings, axis)) for axis in ("data", *MEGATRON_AXES)]
    return " x ".join(f"{axis} {size}" for axis, size in axes if size > 1) or "one rank"


def _outcome(result: dict[str, Any]) -> str:
    return result.get("error") or f"{result['tokens_per_second']:,.0f} tokens/s"


def left_out(settings: BenchSettings) -> dict[str, str]:
    """Return the contenders that cannot be measured, each with the reason."""
    reasons = {}
    if importlib.util.find_spec("transformer_engine") is None:
        reasons["te"] = "Transformer Engine is not installed"
    config = model_config(settings.model, settings.layers)
    bitwise = ModelConfig(path=settings.model, dtype=settings.dtype, backend="local", numerics=BITWISE)
    try:
        check_trainer_numerics(settings.trainer(bitwise), config)
    except UnsupportedError as error:
        reasons[BITWISE] = str(error)
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    if settings.tensor > heads:
        reasons["full"] = (
            f"tensor is {settings.tensor}, and gradients of copied KV heads ({heads}) would not be added up"
        )
    if family_of(config).moe:
        reasons[PEFT] = "transformers stacks the experts of a layer, which PEFT's all-linear does not adapt"
    elif settings.recompute_layers is not None:
        reasons[PEFT] = "Hugging Face recomputes all layers or none (recompute_layers)"
    return {name: reasons[name] for name in settings.contenders if name in reasons}


def compare(settings: BenchSettings, gemm_tflops: float | None, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Add the numbers that compare several contenders. What compares with ``peft`` is per rank."""
    config = model_config(settings.model, settings.layers)
    work = work_per_token(config, rank=settings.r, length=settings.length, response=settings.response)
    succeeded = {result["name"]: result for result in results if "error" not in result}
    for name, result in succeeded.items():
        operations = work.full if name == "full" else work.lora
        per_rank = result["tokens_per_second"] / result["ranks"]
        result["gemm_share"] = operations * per_rank / 1e12 / gemm_tflops if gemm_tflops is not None else None
        if PEFT in succeeded and name != PEFT:
            result["over_peft"] = per_rank / succeeded[PEFT]["tokens_per_second"]
            result["memory_over_peft"] = result["peak_gib"] / succeeded[PEFT]["peak_gib"]
        one = result.get("one_rank", {})
        if "tokens_per_second" in one:
            result["speed_up"] = result["tokens_per_second"] / one["tokens_per_second"]
            result["efficiency"] = result["speed_up"] / result["ranks"]
        full = succeeded.get("full")
        if full is not None and name in LORA and result["backend"] == full["backend"]:
            result["lora_over_full"] = _ratio(result, full)
    if {"local", BITWISE} <= succeeded.keys():
        succeeded[BITWISE]["over_fast"] = succeeded[BITWISE]["step_ms"] / succeeded["local"]["step_ms"]
    return {
        "settings": settings.model_dump(),
        "layout": layout_of(settings),
        "micro_batches": settings.rounds,
        "batch": settings.batch,
        "gemm_tflops": gemm_tflops,
        "work": vars(work),
        "contenders": results,
    }


def _ratio(lora: dict[str, Any], full: dict[str, Any]) -> float:
    """Return how much faster the LoRA step is. If the full step has no optimizer, LoRA's is subtracted."""
    if full["optimizer"]:
        return full["step_ms"] / lora["step_ms"]
    return full["step_ms"] / (lora["step_ms"] - lora["phases"]["optimizer"])
