# SPDX-License-Identifier: Apache-2.0
"""Time MoonshotAI's checkpoint-engine with a plain vLLM engine: the peer of `megarl bench sync` for full weights.

``python -m megarl.sampler.plain.moonshot SETTINGS`` prints the result as the last line, in JSON.

Its way (https://github.com/MoonshotAI/checkpoint-engine): a parameter server beside the engine, on the same GPU,
registers the weights in pinned host memory, copies them to the GPU bucket by bucket, and the engine's worker, which
maps the bucket by CUDA IPC, gives its tensors to vLLM's loaders.
"""

import importlib.util
import json
import os
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megarl.network import LOOPBACK, listen
from megarl.sampler.environment import prepare_environment
from megarl.sampler.plain.engine import plain_arguments, run_json

PACKAGE, DISTRIBUTION = "checkpoint_engine", "checkpoint-engine"
# The first registration also pins memory. Each update allocates its buffers on the GPU.
UPDATES = 4


def is_installed() -> bool:
    """Return True if checkpoint-engine can be imported."""
    return importlib.util.find_spec(PACKAGE) is not None


def time_moonshot(settings: dict[str, Any], log: Path) -> dict[str, Any]:
    """Start a plain vLLM engine in a process of its own, and bring full weights into it by checkpoint-engine.

    Args:
        settings: ``path`` of the model (its weights are not read), ``dtype``, ``kv_cache_gib``, and ``gpu``, the
            CUDA_VISIBLE_DEVICES of that process.
        log: file for what vLLM and checkpoint-engine print.

    Returns:
        ``version`` of checkpoint-engine, ``nbytes``, and medians: ``register_ms``, from the trainer's tensors on the
        GPU to pinned host memory, and ``update_ms``, from there until the engine holds them.

    Raises:
        WorkerError: the process failed.
    """
    return run_json("megarl.sampler.plain.moonshot", [json.dumps(settings)], log)


def main(settings: dict[str, Any]) -> None:
    """Register and update again and again."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": settings["gpu"], "RANK": "0", "WORLD_SIZE": "1"}
    prepare_environment()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # its server and the worker map each other's memory
    from vllm import LLM

    extension = f"{PACKAGE}.worker.VllmColocateWorkerExtension"
    engine = LLM(**plain_arguments(settings), worker_extension_cls=extension)
    from checkpoint_engine.ps import ParameterServer

    with listen(LOOPBACK) as free:
        port = free.getsockname()[1]
    server = ParameterServer(rank=0, world_size=1, master_addr=LOOPBACK, master_port=port)
    tensors = _tensors(settings["path"], settings["dtype"])
    registers, updates = [], []
    for number in range(UPDATES):
        began = time.perf_counter()
        server.register_checkpoint(str(number), named_tensors=tensors, use_shared_memory_pool=True)
        server.gather_metas(str(number))
        registered = time.perf_counter()
        server.update(str(number), lambda paths: engine.collective_rpc("update_weights_from_ipc", args=(dict(paths),)))
        registers.append(registered - began)
        updates.append(time.perf_counter() - registered)
        server.unregister_checkpoint(str(number))
    result = {
        "version": version(DISTRIBUTION),
        "nbytes": sum(tensor.nbytes for tensor in tensors.values()),
        "register_ms": statistics.median(registers[1:]) * 1e3,
        "update_ms": statistics.median(updates[1:]) * 1e3,
    }
    print(json.dumps(result), flush=True)


def _tensors(path: str, dtype: str) -> dict[str, Any]:
    """Return tensors with the names and shapes of the model's, on the GPU, with any values."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=getattr(torch, dtype))
    return {name: torch.zeros_like(tensor, device="cuda") for name, tensor in model.named_parameters()}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
