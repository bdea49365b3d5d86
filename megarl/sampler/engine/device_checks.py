# SPDX-License-Identifier: Apache-2.0
"""Refuse what vLLM cannot do on a device. Imports no vLLM."""

from collections.abc import Mapping
from typing import Any

from megarl.config import EngineConfig
from megarl.config.checks import read_model_shape
from megarl.errors import ConfigError, UnsupportedError

# Sizes of an attention head that vLLM's CPU kernels support (0.32: CPUAttentionBackend). With others it starts, and
# dies at the first request.
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def check_device(config: EngineConfig, device: str) -> None:
    """Refuse models that vLLM cannot compute on the run's device.

    Args:
        config: the engine's config.
        device: ``"cpu"`` or ``"cuda"``.

    Raises:
        UnsupportedError: the model's head size is not supported on a CPU, or a sleep or a shared base is wanted there;
            or adapters in float32 on a GPU.
    """
    if device == "cuda" and config.model.dtype == "float32" and config.checkpoint_engine.content == "adapter":
        raise UnsupportedError(
            "model.dtype is float32, but vLLM's LoRA kernels for GPUs compute in bfloat16 or float16; use bfloat16, or "
            "checkpoint_engine.content=merged"
        )
    if device == "cpu" and config.sampler.sleep:
        raise UnsupportedError("sampler.sleep is true, which needs GPUs; on CPUs trainer and engines share the memory")
    if device == "cpu" and config.sampler.share_base:
        raise UnsupportedError("sampler.share_base is true, which needs GPUs: on CPUs vLLM packs weights anew")
    shape = read_model_shape(config.model.path)
    size = head_dim(shape)
    if device == "cpu" and size and size not in CPU_HEAD_SIZES:
        raise UnsupportedError(
            f"model.path: the sampler does not support attention heads of size {size} (head_dim) on a CPU; supported "
            f"are {', '.join(map(str, CPU_HEAD_SIZES))}, and others on GPUs"
        )


def check_loan(config: EngineConfig, loan: bytes) -> None:
    """Refuse a loan that the settings do not ask for, or that a base from elsewhere would contradict.

    Args:
        config: the engine's config.
        loan: the trainer's, from ``lend_base``; empty for none.

    Raises:
        ConfigError: so it is.
    """
    sampler, sync = config.sampler, config.checkpoint_engine
    if sampler.share_base != bool(loan):
        has = "a loan" if loan else "no loan"
        raise ConfigError(
            f"sampler.share_base is {str(sampler.share_base).lower()}, but the engine gets {has}: give it what the "
            "trainer's lend_base returned, of several GPUs joined (SamplerProcess: loan), or set it to false"
        )
    if loan and (sync.content, sync.base_weights) != ("adapter", "send"):
        raise ConfigError(
            f"sampler.share_base is true with checkpoint_engine.content {sync.content} and base_weights "
            f"{sync.base_weights}; it needs adapter and send"
        )


def head_dim(shape: Mapping[str, Any]) -> int:
    """Return the size of an attention head; 0 if config.json leaves it to the family's default."""
    return shape.get("head_dim") or shape.get("hidden_size", 0) // (shape.get("num_attention_heads") or 1)
