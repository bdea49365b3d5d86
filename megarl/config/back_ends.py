# SPDX-License-Identifier: Apache-2.0
"""Refuse settings that the chosen back end (``model.backend``) does not have."""

from collections.abc import Mapping
from typing import Any

from megarl.config.sections.model import ModelConfig
from megarl.config.trainer import TrainerConfig
from megarl.errors import ConfigError, UnsupportedError

TRANSFORMERS = "transformers"
# Axes of parallel.* that only Megatron-Core has.
MEGATRON_AXES = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")
# Settings of train.* that only Megatron-Core has, each with its value there that means off.
MEGATRON_SWITCHES = {
    "compile": False,
    "cuda_graphs": False,
    "distributed_optimizer": False,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "recompute_layers": None,
}


def check_backend(config: TrainerConfig, shape: Mapping[str, Any]) -> None:
    """Refuse a model or a setting that the back end does not compute.

    Raises:
        ConfigError: ``train.shard_base`` with Megatron-Core.
        UnsupportedError: the message names the setting and what is supported.
    """
    if config.model.backend == TRANSFORMERS:
        check_transformers(config)
    elif config.train.shard_base:
        raise ConfigError(
            f"train.shard_base is true with model.backend '{config.model.backend}', which splits the base by "
            "parallel.tensor and parallel.pipeline; set it to false, or model.backend=transformers"
        )
    check_te(config.model, shape)


def check_transformers(config: TrainerConfig) -> None:
    """Refuse what only Megatron-Core has.

    Raises:
        UnsupportedError: the message names the setting.
    """
    refused = {
        f"parallel.{axis} = {getattr(config.parallel, axis)}": getattr(config.parallel, axis) > 1
        for axis in MEGATRON_AXES
    }
    refused |= {
        f"train.{name} = {getattr(config.train, name)}": getattr(config.train, name) != off
        for name, off in MEGATRON_SWITCHES.items()
    }
    refused["train.recompute = 'selective'"] = config.train.recompute == "selective"
    refused[f"lora.save_experts = '{config.lora.save_experts}'"] = config.lora.save_experts != "as_trained"
    for setting, is_set in refused.items():
        if is_set:
            raise UnsupportedError(
                f"model.backend is 'transformers' with {setting}; supported are parallel.data, train.shard_base and "
                "train.recompute none or full; for the others use model.backend=local or te"
            )


def check_te(model: ModelConfig, shape: Mapping[str, Any]) -> None:
    """Refuse models that the Transformer Engine back end has not been shown to compute exactly.

    Raises:
        UnsupportedError: multi-latent attention, or biases, with ``te``.
    """
    if model.backend != "te":
        return
    if shape.get("kv_lora_rank"):
        raise UnsupportedError(
            f"model.backend is 'te', but the model has multi-latent attention (kv_lora_rank = {shape['kv_lora_rank']} "
            "in its config.json); supported is 'local'"
        )
    if shape.get("attention_bias") or shape.get("mlp_bias"):
        raise UnsupportedError(
            "model.backend is 'te', but config.json has attention_bias or mlp_bias true; supported is 'local'"
        )
