# SPDX-License-Identifier: Apache-2.0
"""Apply PEFT's rules for an adapter config: supported settings, rank and scaling of each module."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from peft import LoraConfig
from peft.utils.other import get_pattern_key

from megarl.errors import AdapterError, UnsupportedError, nearest
from megarl.peft.values import check_values

# PEFT fields of which every value is supported, or that do not change the computation.
UNDERSTOOD = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "target_modules", "target_parameters", "exclude_modules", "lora_alpha", "lora_dropout", "use_rslora",
    "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "megatron_config", "megatron_core",
    "loftq_config", "eva_config", "runtime_config", "init_lora_weights",
}  # fmt: skip
# Values of PEFT's ``init_lora_weights`` that leave the base model unchanged.
HARMLESS_INITS = (True, False, "gaussian", "orthogonal", "eva")
# Settings of PEFT that are often used and not implemented -> advice for the message.
ADVICE = {
    "use_dora": "train without DoRA, or merge the adapter into the base with PEFT (merge_and_unload) and start there",
    "bias": "biases are base weights here and stay frozen: train with bias='none'",
    "lora_bias": "train with lora_bias=false; vLLM has no bias on an adapter either",
    "modules_to_save": "whole trained modules are no adapter: adapt embed_tokens and lm_head by target_modules instead",
    "trainable_token_indices": "adapt embed_tokens by target_modules instead",
    "layer_replication": "save the model with its layers replicated first",
}
# Advice for values of ``init_lora_weights`` that also change the base's weights.
CHANGED_BASE = (
    "it starts from a changed base model, which the adapter alone does not hold: let PEFT save it as plain LoRA "
    "(save_pretrained with path_initial_model_for_weight_conversion) and load that"
)


def read_config(plain: Any, subject: str = "adapter config") -> LoraConfig:
    """Parse the contents of ``adapter_config.json``.

    Args:
        plain: the parsed JSON.
        subject: start of the error messages.

    Raises:
        AdapterError: it is not LoRA, PEFT does not know a field, or a value is impossible for its field.
        UnsupportedError: ``check_supported`` refuses a setting.
    """
    if not isinstance(plain, Mapping) or plain.get("peft_type") != "LORA":
        kind = plain.get("peft_type") if isinstance(plain, Mapping) else type(plain).__name__
        raise AdapterError(f"{subject}: peft_type is {kind!r}; supported is 'LORA'")
    known = {field.name for field in dataclasses.fields(LoraConfig)}
    unknown = sorted(key for key, value in plain.items() if key not in known and value)
    if unknown:
        raise AdapterError(
            f"{subject}: unknown field '{unknown[0]}'{nearest(unknown[0], known)}; update peft or remove it"
        )
    check_values(plain, subject)
    try:
        config = LoraConfig(**{key: value for key, value in plain.items() if key in known and key != "runtime_config"})
    except (TypeError, ValueError, AttributeError) as error:
        raise AdapterError(f"{subject}: PEFT refuses it: {error}") from error
    check_supported(config)
    return config


def check_supported(config: LoraConfig) -> None:
    """Refuse PEFT settings that would change the computation and are not implemented.

    Raises:
        AdapterError: a value is impossible for its field.
        UnsupportedError: a setting is not supported; the message names the field, its value and what to do.
    """
    check_values(config)
    reference = LoraConfig()
    if config.init_lora_weights not in HARMLESS_INITS:
        raise UnsupportedError(f"adapter config: init_lora_weights is {config.init_lora_weights!r}; {CHANGED_BASE}")
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in UNDERSTOOD and value != getattr(reference, field.name) and value:
            if field.name in ADVICE:
                raise UnsupportedError(f"adapter config: {field.name} is {value!r}; {ADVICE[field.name]}")
            supported = ", ".join(
                sorted(UNDERSTOOD - {"megatron_config", "megatron_core", "loftq_config", "eva_config"})
            )
            raise UnsupportedError(
                f"adapter config: {field.name} is {value!r}, which is not supported (are: {supported})"
            )


def rank_and_scaling(config: LoraConfig, name: str) -> tuple[int, float]:
    """Return rank and scaling of an adapted module or parameter, as PEFT resolves its patterns.

    The scaling is alpha / r; with rsLoRA alpha / sqrt(r) (Kalajdzievski, arXiv:2312.03732).

    Args:
        config: PEFT's config, from ``megarl.lora.targets.parameters.as_peft_reads``.
        name: name of the module or parameter, with which the patterns are compared.
    """
    rank = config.rank_pattern.get(get_pattern_key(list(config.rank_pattern), name), config.r)
    alpha = config.alpha_pattern.get(get_pattern_key(list(config.alpha_pattern), name), config.lora_alpha)
    return rank, alpha / (math.sqrt(rank) if config.use_rslora else rank)
