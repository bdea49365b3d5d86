# SPDX-License-Identifier: Apache-2.0
"""Refuse arguments of vLLM's engine in ``sampler.engine_args`` that megarl passes itself."""

from collections.abc import Collection, Mapping
from typing import Any

from megarl.errors import ConfigError

# vLLM's argument -> the megarl setting that decides it.
SETTINGS = {
    "model": "model.path",
    "dtype": "model.dtype",
    "tensor_parallel_size": "sampler.parallel.tensor",
    "load_format": "checkpoint_engine.base_weights",
    "seed": "sampler.seed",
    "max_model_len": "sampler.max_prompt_tokens and sampler.max_response_tokens",
    "max_num_seqs": "sampler.max_num_seqs",
    "enforce_eager": "sampler.enforce_eager",
    "kv_cache_memory_bytes": "sampler.kv_cache_gib",
    "enable_sleep_mode": "sampler.sleep",
    "gpu_memory_utilization": "sampler.gpu_memory_utilization",
    "enable_lora": "checkpoint_engine.content",
    "max_lora_rank": "lora.r",
    "data_parallel_size": "sampler.engines",
}
# Arguments that would place an engine's ranks where no weights are sent.
PLACED = ("pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel", "distributed_executor_backend")


# Tokens of a page of the KV cache: a multiple of ``megarl.bitwise.kernels.attention.TILE``.
PAGE = 64


def bitwise_arguments(arguments: Mapping[str, Any], numerics: str) -> dict[str, Any]:
    """Return arguments of vLLM's engine with those that ``model.numerics: bitwise`` needs.

    Nothing is compiled, because a compiler may merge operations. Whole decoding steps are captured as CUDA graphs.

    Args:
        arguments: megarl's arguments.
        numerics: ``model.numerics``; ``fast`` changes nothing.
    """
    if numerics == "fast":
        return dict(arguments)
    compilation = arguments.get("compilation_config", {})
    graphs = "NONE" if arguments["enforce_eager"] else "FULL_DECODE_ONLY"
    return dict(arguments) | {
        "attention_backend": "TRITON_ATTN",
        "block_size": PAGE,
        "compilation_config": compilation | {"mode": 0, "custom_ops": ["all"], "cudagraph_mode": graphs},
    }


def check_engine_args(given: Mapping[str, Any], owned: Collection[str]) -> None:
    """Refuse arguments that megarl passes to vLLM itself.

    Args:
        given: ``sampler.engine_args``.
        owned: names of the arguments that megarl sets.

    Raises:
        ConfigError: an argument is megarl's; the message names it, and the setting to use if there is one.
    """
    for name in sorted({*owned, *PLACED} & given.keys()):
        setting = SETTINGS.get(name)
        fix = f"use {setting}" if setting else "megarl depends on its value; remove it"
        raise ConfigError(f"sampler.engine_args.{name} is {given[name]!r}, which megarl sets itself; {fix}")
