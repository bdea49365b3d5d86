# SPDX-License-Identifier: Apache-2.0
"""Time vLLM's own way to a new adapter: files, loaded by a plain engine. The peer of `megarl bench sync`.

``python -m megarl.sampler.plain.engine SETTINGS PATH ...`` prints the result as the last line, in JSON.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.errors import WorkerError
from megarl.sampler.environment import prepare_environment

# The longest that a plain engine may take with all that it measures.
RUN_SECONDS = 1800.0


def time_plain_engine(settings: dict[str, Any], adapters: Sequence[str], log: Path) -> dict[str, float]:
    """Start a plain vLLM engine in a process of its own and load adapters into it.

    Args:
        settings: ``path`` and ``dtype`` of the model (its weights are not read), ``rank``, ``kv_cache_gib``,
            ``tensor`` (number of ranks).
        adapters: PEFT folders.
        log: file for what vLLM prints.

    Returns:
        ``start_seconds`` of the engine, ``load_ms`` of an adapter (median).

    Raises:
        WorkerError: the engine failed.
    """
    return run_json("megarl.sampler.plain.engine", [json.dumps(settings), *adapters], log)


def run_json(module: str, arguments: Sequence[str], log: Path) -> dict[str, Any]:
    """Run a module with a plain vLLM engine, and return the JSON object that it prints last.

    Raises:
        WorkerError: it failed, printed none, or took longer than ``RUN_SECONDS``.
    """
    with log.open("w") as handle:
        try:
            run = subprocess.run(
                [sys.executable, "-m", module, *arguments],
                stdout=subprocess.PIPE,
                stderr=handle,
                text=True,
                timeout=RUN_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise WorkerError(f"the plain vLLM engine took longer than {RUN_SECONDS:.0f} s; its log: {log}") from error
    # Its children may print something at their end.
    objects = [line for line in run.stdout.splitlines() if line.startswith("{")]
    if run.returncode or not objects:
        raise WorkerError(f"the plain vLLM engine ended with status {run.returncode}; its log: {log}")
    return json.loads(objects[-1])


def plain_arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a small ``vllm.LLM`` without weights.

    Args:
        settings: ``path``, ``dtype`` and ``kv_cache_gib``, as for ``time_plain_engine``.
    """
    return {
        "model": settings["path"],
        "dtype": settings["dtype"],
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 128,
        "max_num_seqs": 16,
        "gpu_memory_utilization": 0.3,  # looked at only when it starts; the trainer may have the rest
        "kv_cache_memory_bytes": int(settings["kv_cache_gib"] * 2**30),
    }


def main(settings: dict[str, Any], adapters: Sequence[str]) -> None:
    """Load each adapter once, after the first as a warm-up."""
    prepare_environment()
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    began = time.perf_counter()
    lora = {"enable_lora": True, "max_lora_rank": settings["rank"], "max_loras": 2, "max_cpu_loras": 4}
    engine = LLM(**plain_arguments(settings), tensor_parallel_size=settings["tensor"], **lora).llm_engine
    started, loads = time.perf_counter() - began, []
    for number, path in enumerate(adapters, start=1):
        began = time.perf_counter()
        engine.add_lora(LoRARequest(f"adapter-{number}", number, path))
        loads.append(time.perf_counter() - began)
    print(json.dumps({"start_seconds": started, "load_ms": statistics.median(loads[1:]) * 1e3}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2:])
