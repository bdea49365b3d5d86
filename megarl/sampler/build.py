# SPDX-License-Identifier: Apache-2.0
"""Build vLLM's engine from an EngineConfig."""

import dataclasses
from importlib import import_module
from typing import Any

from megarl.config import EngineConfig
from megarl.errors import ConfigError, nearest
from megarl.sampler.settings import engine_arguments


def import_vllm() -> None:
    """Import what ``build_engine`` needs, which takes seconds."""
    import_module("vllm.v1.engine.async_llm")


def build_engine(config: EngineConfig, engine_index: int, device: str) -> Any:
    """Return a running ``AsyncLLM``.

    Args:
        config: the engine's config.
        engine_index: index of the engine, 0 .. sampler.engines - 1.
        device: ``"cpu"`` or ``"cuda"``.

    Raises:
        ConfigError: ``sampler.engine_args`` names an argument that vLLM does not have.
        Exception: whatever vLLM raises.
    """
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    given = engine_arguments(config, engine_index, device)
    known = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
    for name in given.keys() - known:
        raise ConfigError(f"sampler.engine_args.{name}: vLLM has no such argument{nearest(name, known)}")
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**given))
