# SPDX-License-Identifier: Apache-2.0
"""Run `megarl bench sync`: time how new weights come from a trainer into live engines, beside ceilings and peers."""

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.bench.adapters import lora_section
from megarl.bench.random_weights import TMPFS, model_folder
from megarl.bench.syncing.ceilings import broadcast_rate, copy_rate
from megarl.bench.syncing.choose import decode_rate, sampler_settings
from megarl.bench.syncing.device_memory import DeviceMemory
from megarl.bench.syncing.pause import measure_pause
from megarl.bench.syncing.peers import measure_peers
from megarl.bench.syncing.settings import SyncBenchSettings
from megarl.bench.syncing.trainer import SyncTrainer
from megarl.bench.training.ranks import check_gpus
from megarl.checkpoint_engine.phases import SyncReport
from megarl.sampler.process import SamplerProcess
from megarl.verify.launch import report_progress, run_ranks

# Tokens that trainer and engine both score after the syncs; sizes of an engine.
SCORED, REQUESTS, RESPONSE = 64, 8, 64
# vLLM's compilation of an engine whose rate is not measured.
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
# Syncs of the base after the first, which also connects, plans and compiles.
BASES = 5


def bench_sync(
    settings: SyncBenchSettings, out: Path, *, report: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Measure syncs of every content.

    Args:
        settings: what to measure.
        out: folder for the engines' logs.
        report: called with a line before each part.

    Returns:
        ``settings``, ``transport``, ``rows`` (one per kind of weights), ``ceilings`` (GB/s), and what
        ``measure_peers`` returns.
    """
    check_gpus(settings.tensor, settings.device, f"an engine of {settings.tensor} ranks (tensor)")
    check_gpus(settings.data, settings.device, f"a trainer of {settings.data} ranks (data)")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=TMPFS) as scratch:
        folder = model_folder(settings.model, Path(scratch), settings.layers)
        report("the trainer builds")
        if settings.data == 1:
            return _on_rank(settings, folder, Path(scratch), out, report)
        result, *_ = run_ranks(_on_rank, settings.data, settings, folder, Path(scratch), out, report=report)
        return result


def _on_rank(
    settings: SyncBenchSettings,
    folder: Path,
    scratch: Path,
    out: Path,
    report: Callable[[str], None] = report_progress,
) -> dict[str, Any]:
    """Be one rank of the trainer; rank 0 has the engines too, and returns what ``bench_sync`` does."""
    trainer = SyncTrainer(settings, folder)
    result: dict[str, Any] = {"settings": settings.model_dump(), "rows": []}
    if trainer.model.groups.rank != 0:
        trainer.follow()
        return result
    for content in settings.contents:
        report(f"{content}: {settings.engines} engines start; log: {out}/sync-{content}-0.log")
        with _engines(settings, folder, content, out) as (engines, seconds):
            result["engine_start_seconds"] = seconds
            result["transport"], rows = _measure(settings, trainer, engines, content, report)
            result["rows"] += rows
    device = trainer.model.groups.device
    result["ceilings"] = {"copy": copy_rate(device, max(row["nbytes"] for row in result["rows"]))}
    if _spread(settings):
        report("the ceiling: a NCCL broadcast of as many bytes")
        for row in result["rows"]:
            row["broadcast"] = broadcast_rate(row["nbytes"], range(settings.data, _wanted(settings)))
    if settings.peers and settings.data == 1:
        gpu = gpus_of(settings, 0)[0] if device.type == "cuda" else None
        result |= measure_peers(settings, trainer.model, folder, scratch, out, gpu, report)
    trainer.end()
    return result


def _wanted(settings: SyncBenchSettings) -> int:
    """Return how many GPUs give one to each rank of trainer and engines."""
    return settings.data + settings.engines * settings.tensor


def _spread(settings: SyncBenchSettings) -> bool:
    """Return True if each engine has GPUs of its own."""
    return settings.device != "cpu" and torch.cuda.device_count() >= _wanted(settings)


def gpus_of(settings: SyncBenchSettings, engine: int) -> list[int]:
    """Return the GPUs of an engine, as this process counts them; the trainer has the first ones."""
    places = max(1, torch.cuda.device_count() // settings.tensor)
    first = settings.data + engine * settings.tensor if _spread(settings) else engine % places * settings.tensor
    return list(range(first, first + settings.tensor))


@contextlib.contextmanager
def _engines(
    settings: SyncBenchSettings, folder: Path, content: str, out: Path
) -> Iterator[tuple[list[SamplerProcess], float]]:
    """Start the engines; yield them and the seconds that the slowest needed."""
    began = time.perf_counter()
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(
                SamplerProcess(
                    {"path": str(folder), "dtype": settings.dtype},
                    lora=lora_section(settings.r),
                    sampler=_sampler(settings),
                    checkpoint_engine={"transport": settings.transport, "content": content},
                    device=settings.device,
                    gpus=gpus_of(settings, i) if torch.cuda.is_available() else None,
                    log=out / f"sync-{content}-{i}.log",
                    index=i,
                )
            )
            for i in range(settings.engines)
        ]
        for engine in engines:
            engine.wait()
        yield engines, time.perf_counter() - began
        with ThreadPoolExecutor(len(engines)) as pool:  # vLLM takes seconds to end
            list(pool.map(SamplerProcess.close, engines))


def _sampler(settings: SyncBenchSettings) -> dict[str, Any]:
    given = {
        "samples_per_prompt": 2,
        "max_prompt_tokens": SCORED,
        "max_response_tokens": RESPONSE,
        "max_num_seqs": REQUESTS,
        "kv_cache_gib": settings.kv_cache_gib,
        "parallel": {"tensor": settings.tensor},
    }
    if settings.choose:
        return given | sampler_settings(settings)
    # Decoding is replayed from graphs, as in training. Compiling would take minutes and change no sync.
    return given | {"engine_args": {"compilation_config": GRAPHS}}


def _measure(
    settings: SyncBenchSettings,
    trainer: SyncTrainer,
    engines: list[SamplerProcess],
    content: str,
    report: Callable[[str], None],
) -> tuple[str, list[dict[str, Any]]]:
    """Time the base and then many versions; check that every engine computes what the trainer does.

    Returns:
        The name of the transport, and the rows.
    """
    memory = DeviceMemory([*range(settings.data), *gpus_of(settings, 0)])
    trainer.open(content, engines)
    first, *others = [trainer.sync("base") for _ in range(1 + BASES)]
    rows = [_row("first base", [first]), _row("base", others)]
    trainer.sync()
    times = []
    report(f"{content}: {settings.rounds} syncs")
    for number in range(settings.rounds):
        trainer.change(settings.seed + number + 1)
        times.append(trainer.sync())
    row = _row(content, times)
    stages = ", ".join(f"{name} {ms:.2f}" for name, ms in row["stages_ms"].items())
    report(f"{content}: {row['nbytes'] / 2**20:.1f} MiB in {row['ms']:.2f} ms ({stages})")
    row["memory_mib"] = memory.grown()
    vocabulary = trainer.model.hf_config["vocab_size"]
    row |= _differences(trainer, engines, vocabulary)
    if settings.choose:
        row["tokens_per_second"] = decode_rate(settings, engines, trainer.version, vocabulary)
        report(f"{content}: {row['tokens_per_second']:,.0f} tokens/s")
    if content == "adapter":
        report(f"adapter: logprobs differ by {row['logprob_difference']:.1e}; syncs while requests run")
        tokens = settings.response_tokens if settings.choose else RESPONSE
        row["pause_ms"] = measure_pause(trainer, engines[0], vocabulary, tokens, report)
    trainer.close()
    return trainer.transport, [*rows, row]


def _row(kind: str, times: list[tuple[float, SyncReport]]) -> dict[str, Any]:
    reports = [report for _, report in times]
    stages = {
        name: statistics.median(getattr(one, part).get(name, 0.0) for one in reports) * 1e3
        for part in ("seconds", "stages")
        for name in getattr(reports[-1], part)
    }
    return {
        "kind": kind,
        "nbytes": reports[-1].nbytes,
        "tensors": reports[-1].count,
        "ms": statistics.median(seconds for seconds, _ in times) * 1e3,
        "worst_ms": max(seconds for seconds, _ in times) * 1e3,
        "syncs": len(times),
        "stages_ms": stages,
    }


def _differences(trainer: SyncTrainer, engines: list[SamplerProcess], vocabulary: int) -> dict[str, float]:
    """Compare the logprobs of trainer and engines on random tokens: the largest and the mean difference."""
    tokens = np.random.default_rng(0).integers(0, vocabulary, SCORED)
    expected = trainer.logprobs(tokens)
    found = np.abs([engine.score(tokens, trainer.version) - expected for engine in engines])
    return {"logprob_difference": float(found.max()), "logprob_difference_mean": float(found.mean())}
