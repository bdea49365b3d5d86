# SPDX-License-Identifier: Apache-2.0
"""Time the peers of `megarl bench sync`: vLLM's own way to an adapter, and checkpoint-engine for full weights."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl.bench.syncing.settings import SyncBenchSettings
from megarl.errors import UnsupportedError, WorkerError
from megarl.model.trained_model import TrainedModel
from megarl.sampler.engine.adapters import buffer_rank
from megarl.sampler.environment import names_of_gpus
from megarl.sampler.plain.engine import time_plain_engine
from megarl.sampler.plain.moonshot import is_installed, time_moonshot


def measure_peers(
    settings: SyncBenchSettings,
    model: TrainedModel,
    folder: Path,
    scratch: Path,
    out: Path,
    gpu: int | None,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Measure the peers that this host has; a peer that fails does not stop the next.

    Args:
        settings: of the bench.
        model: the trainer's.
        folder: the model's, for the plain engines.
        scratch: a memory-backed folder for the saved adapters.
        out: folder for the engines' logs.
        gpu: the GPU of an engine, as this process counts them; None without GPUs.
        report: called with a line before each part.

    Returns:
        ``disk``, or ``disk_error`` with the reason; the same for ``moonshot`` where it is installed and there is a GPU.
    """
    found: dict[str, Any] = {}

    def note(name: str, line: str, measure: Callable[[], dict[str, Any]]) -> None:
        report(line)
        try:
            found[name] = measure()
        except (WorkerError, UnsupportedError) as error:
            found[f"{name}_error"] = str(error)

    engine = {"path": str(folder), "dtype": settings.dtype, "kv_cache_gib": settings.kv_cache_gib}
    note(
        "disk",
        "vLLM's own way: save, and load into a running engine",
        lambda: _disk(settings, model, engine, scratch, out),
    )
    if gpu is not None and is_installed():
        note(
            "moonshot",
            "MoonshotAI's checkpoint-engine: full weights",
            lambda: time_moonshot(engine | {"gpu": names_of_gpus([gpu])}, out / "sync-moonshot.log"),
        )
    return found


def _disk(
    settings: SyncBenchSettings, model: TrainedModel, engine: dict[str, Any], scratch: Path, out: Path
) -> dict[str, Any]:
    """Time PEFT's file format through memory-backed files into a plain vLLM engine."""
    saved = []
    paths = [scratch / f"adapter-{number}" for number in range(3)]
    for path in paths:
        began = time.perf_counter()
        model.save_adapter(path)
        saved.append(time.perf_counter() - began)
    loaded = time_plain_engine(
        engine | {"rank": buffer_rank(settings.r), "tensor": settings.tensor},
        [str(path) for path in paths],
        out / "sync-plain.log",
    )
    return {"save_ms": statistics.median(saved) * 1e3, **loaded}
