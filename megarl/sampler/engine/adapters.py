# SPDX-License-Identifier: Apache-2.0
"""Decide what an engine needs for a run's adapter, and refuse adapters that vLLM does not take."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.config import EngineConfig
from megarl.errors import ConfigError, UnsupportedError
from megarl.families.base import SamplerSupport
from megarl.files import read_json

# vLLM's MaxLoRARanks: the ranks that its kernels' buffers may have.
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# Modules whose adapters vLLM holds in another layout than a linear's, or not at all.
NOT_SAMPLED = ("model.embed_tokens", "lm_head")


def check_adapter(config: EngineConfig, shape: Mapping[str, Any], support: SamplerSupport) -> None:
    """Refuse adapters, and weights of the base, that a sync cannot bring into a model.

    Args:
        config: the engine's config.
        shape: the model's config.json.
        support: what vLLM takes of its type.

    Raises:
        UnsupportedError: the message names the setting.
    """
    model_type, engine = f"for model_type '{shape.get('model_type')}'", config.checkpoint_engine
    if support.adapted and (stacks := _section(config).get("target_parameters")):
        raise UnsupportedError(
            f"lora.target_parameters is {stacks}; {model_type} the sampler takes adapters of "
            f"{', '.join(support.adapted)} only, so leave it out"
        )
    if support.reads_base and (engine.content, engine.base_weights) != ("adapter", "disk"):
        raise UnsupportedError(
            f"checkpoint_engine.content is '{engine.content}', base_weights '{engine.base_weights}'; {model_type} the "
            "sampler must read the base from its files: use content=adapter and base_weights=disk"
        )
    targets = _section(config)["target_modules"]
    for module in NOT_SAMPLED:
        if isinstance(targets, str):
            targeted = targets != "all-linear" and re.fullmatch(targets, module) is not None
        else:
            targeted = any(f".{module}".endswith(f".{target}") for target in targets or ())
        merged_in = config.checkpoint_engine.content == "merged" and shape.get("tie_word_embeddings") is False
        if targeted and not merged_in:
            raise UnsupportedError(
                f"lora.target_modules: the sampler does not support adapters of '{module}'; supported are attention, "
                "MLPs, experts and routers, and with checkpoint_engine.content=merged untied embeddings"
            )


def _section(config: EngineConfig) -> dict[str, Any]:
    """Return the adapter's PEFT settings: the section's, or those of ``lora.init_from``."""
    if config.lora.init_from:
        return read_json(
            Path(config.lora.init_from).expanduser() / "adapter_config.json", "lora.init_from", ConfigError
        )
    return config.lora.model_dump()


def max_lora_rank(config: EngineConfig) -> int:
    """Return the smallest buffer rank that holds every module's rank.

    Raises:
        UnsupportedError: a rank exceeds vLLM's largest.
    """
    lora = _section(config)
    rank = max([lora["r"], *(lora.get("rank_pattern") or {}).values()])
    if lora.get("target_parameters"):
        # PEFT then also stacks experts in target_modules; their gate and up become one pair of twice the rank.
        rank = max(rank, 2 * lora["r"])
    return buffer_rank(rank)


def buffer_rank(rank: int) -> int:
    """Return vLLM's smallest buffer rank that holds a rank.

    Raises:
        UnsupportedError: it exceeds vLLM's largest.
    """
    fitting = [size for size in LORA_RANKS if size >= rank]
    if not fitting:
        raise UnsupportedError(f"the adapter has rank {rank}; vLLM supports at most {LORA_RANKS[-1]}")
    return fitting[0]
