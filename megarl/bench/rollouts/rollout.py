# SPDX-License-Identifier: Apache-2.0
"""Run `megarl bench rollout`: tokens per second of an engine, by weights, way of logprobs and concurrency."""

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megarl.bench.adapters import lora_section, save_adapter
from megarl.bench.random_weights import TMPFS, save_model
from megarl.bench.rollouts.settings import RolloutBenchSettings
from megarl.bench.settings import model_config
from megarl.checkpoint_engine.folder_source import FolderSource
from megarl.checkpoint_engine.manager import CheckpointEngineManager
from megarl.config import CheckpointEngineConfig
from megarl.sampler.drawing.fetched_logprobs import Source
from megarl.sampler.engine.adapters import buffer_rank
from megarl.sampler.engine.settings import stop_tokens
from megarl.sampler.environment import resolve_device
from megarl.sampler.plain.rates import Load, count_tokens, rates
from megarl.sampler.plain.rollout import time_plain_rollouts
from megarl.sampler.process import SamplerProcess

SOURCES: tuple[Source, ...] = ("worker", "vllm", "none")
# Of the memory, which vLLM wants to be free when an engine starts; two start at once.
GPU_SHARE = 0.4


def bench_rollout(
    settings: RolloutBenchSettings, out: Path, *, report: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Start megarl's engines side by side, and measure them one after the other; plain vLLM comes last, alone.

    Args:
        settings: what to measure.
        out: folder for the engines' logs.
        report: called with a line before each part.

    Returns:
        ``settings``; ``rates``: weights -> logprobs (``"worker"``, ``"vllm"``, ``"none"``) -> tokens/s by concurrency;
        ``plain``: the same of ``vllm.LLM``, without ``"worker"``; ``start_seconds`` of each engine.
    """
    out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"settings": settings.model_dump(), "rates": {}, "plain": {}, "start_seconds": {}}
    with tempfile.TemporaryDirectory(dir=TMPFS) as scratch:
        report("the weights are written")
        device = resolve_device(settings.device)
        folder = save_model(settings.model, Path(scratch), settings.dtype, device, settings.seed, settings.layers)
        adapter = Path(scratch) / "adapter"
        save_adapter(folder, adapter, settings.r, settings.dtype, settings.seed)
        with contextlib.ExitStack() as stack:
            engines = {}
            for content in settings.contents:
                log = out / f"rollout-{content}.log"
                report(f"{content}: an engine starts; log: {log}")
                process = SamplerProcess(**_engine(settings, folder, content), device=device, log=log)
                engines[content] = stack.enter_context(process)
            for content, engine in engines.items():
                engine.wait()
                result["start_seconds"][content] = engine.start_seconds
            for content, engine in engines.items():
                result["rates"] |= _measure(settings, engine, adapter if content == "adapter" else None, report)
        for content in settings.plain:
            log = out / f"rollout-plain-{content}.log"
            report(f"plain vLLM, {content}; log: {log}")
            timed = time_plain_rollouts(
                _plain(settings, folder, adapter if content == "adapter" else None, device), log
            )
            result["plain"] |= timed["rates"]
            result["start_seconds"][f"plain {content}"] = timed["start_seconds"]
    return result


def _load(settings: RolloutBenchSettings) -> Load:
    given = settings.model_dump(include={field.name for field in dataclasses.fields(Load)})
    return Load(**given, vocabulary=model_config(settings.model)["vocab_size"])


def _engine(settings: RolloutBenchSettings, folder: Path, content: str) -> dict[str, Any]:
    """Return arguments of ``SamplerProcess``."""
    return {
        "model": {"path": str(folder), "dtype": settings.dtype},
        "lora": lora_section(settings.r),
        "sampler": {
            "samples_per_prompt": settings.samples,
            "max_prompt_tokens": settings.prompt_tokens,
            "max_response_tokens": settings.response_tokens,
            "max_num_seqs": max(settings.concurrency),
            "kv_cache_gib": settings.kv_cache_gib,
            "gpu_memory_utilization": GPU_SHARE,
        },
        "checkpoint_engine": {"base_weights": "disk", "content": content, "transport": "shm"},
    }


def _measure(
    settings: RolloutBenchSettings, engine: SamplerProcess, adapter: Path | None, report: Callable[[str], None]
) -> dict[str, dict[str, list[float]]]:
    """Time what one engine samples from: an adapter and the base, or the merged weights that it was started with."""

    def way(version: int, logprobs: Source) -> Callable[[list[np.ndarray]], int]:
        def sample(prompts: list[np.ndarray]) -> int:
            engine.take_logprobs_from(logprobs)
            return count_tokens(engine.generate(prompts, version))

        return sample

    found = {}
    for version, weights in enumerate(("adapter", "base") if adapter else ("merged",)):
        report(f"{weights}: {len(SOURCES)} ways of logprobs, {settings.rounds} rounds at each concurrency")
        if weights == "adapter":
            source = FolderSource()
            source.read(Path(str(adapter)), version)
            section = CheckpointEngineConfig(transport="shm")
            CheckpointEngineManager(source, [engine], section).sync(version, "adapter")
        else:
            engine.use_base(version)
        found[weights] = rates(_load(settings), {logprobs: way(version, logprobs) for logprobs in SOURCES})
        # A run that is cut off leaves what it measured.
        shown = (f"{name} {', '.join(f'{rate:,.0f}' for rate in row)}" for name, row in found[weights].items())
        report(f"{weights}: tokens/s at {settings.concurrency}: {'; '.join(shown)}")
    return found


def _plain(settings: RolloutBenchSettings, folder: Path, adapter: Path | None, device: str) -> dict[str, Any]:
    """Return the settings of ``time_plain_rollouts``; vLLM's defaults decide on all else."""
    load = _load(settings)
    arguments: dict[str, Any] = {
        "model": str(folder),
        "dtype": settings.dtype,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "max_model_len": load.longest,
        "max_num_seqs": max(settings.concurrency),
        "kv_cache_memory_bytes": int(settings.kv_cache_gib * 2**30),
        "gpu_memory_utilization": GPU_SHARE,
    }
    if adapter:
        arguments |= {"enable_lora": True, "max_lora_rank": buffer_rank(settings.r)}
    if device == "cpu":
        arguments |= {"enforce_eager": True, "block_size": 32}
    sampling = {
        "n": settings.samples,
        "temperature": 1.0,
        "max_tokens": settings.response_tokens,
        "ignore_eos": True,
        "stop_token_ids": list(stop_tokens(str(folder))),
    }
    return {
        "arguments": arguments,
        "adapter": str(adapter) if adapter else None,
        "sampling": sampling,
        "load": dataclasses.asdict(load),
    }
