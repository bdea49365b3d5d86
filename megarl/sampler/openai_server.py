# SPDX-License-Identifier: Apache-2.0
"""Return the arguments of vLLM's OpenAI server for an adapter on its base model."""

import json
from typing import Any

from megarl.config import EngineConfig
from megarl.config.checks import read_model_shape
from megarl.sampler.engine.settings import BATCHED_TOKENS, engine_arguments

# Arguments of a training engine that the server keeps; the others make it wait for weights, or fit it to training.
KEPT = ("dtype", "tensor_parallel_size", "enforce_eager")
# And on a CPU, where vLLM's defaults take 4 GiB for the cache, and a step must hold a whole prompt.
KEPT_ON_CPU = ("block_size", "enable_chunked_prefill")
CPU_CACHE_BYTES = 2**30
BASE = "base"


def server_arguments(config: EngineConfig, device: str, name: str) -> list[str]:
    """Return options of `vllm serve`, without the model's folder.

    Args:
        config: the engine's config; ``lora.init_from`` is the adapter, None serves the base alone.
        device: ``"cpu"`` or ``"cuda"``.
        name: name of the adapter in requests; the base model's is ``base``.
    """
    given = engine_arguments(config, 0, device)
    owned = {key: given[key] for key in (*KEPT, *config.sampler.engine_args)}
    if device == "cpu":
        positions = read_model_shape(config.model.path).get("max_position_embeddings") or BATCHED_TOKENS[device]
        owned |= {key: given[key] for key in KEPT_ON_CPU} | {
            "kv_cache_memory_bytes": max(CPU_CACHE_BYTES, given["kv_cache_memory_bytes"]),
            "max_num_batched_tokens": BATCHED_TOKENS[device],
            "max_model_len": min(positions, BATCHED_TOKENS[device]),
        }
    options = ["--served-model-name", BASE]
    if config.lora.init_from:
        options += ["--enable-lora", "--max-lora-rank", str(given["max_lora_rank"])]
        options += ["--lora-modules", f"{name}={config.lora.init_from}"]
    for key, value in owned.items():
        flag = f"--{key.replace('_', '-')}"
        if isinstance(value, bool):
            options.append(flag if value else f"--no-{flag[2:]}")
        elif value is not None:
            options += [flag, *map(_text, value if isinstance(value, list | tuple) else [value])]
    return options


def _text(value: Any) -> str:
    """Return a value as vLLM's parser reads it."""
    return json.dumps(value) if isinstance(value, dict) else str(value)
