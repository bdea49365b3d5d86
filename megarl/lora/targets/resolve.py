"""Which layers a PEFT config adapts, at which rank and scaling: pure decisions, before anything is changed."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from megarl.errors import AdapterError, UnsupportedError, nearest
from megarl.lora.targets.experts import check_experts, check_expression
from megarl.lora.targets.parameters import as_read, resolve_parameters
from megarl.model.weights.families import WeightMap
from megarl.model.weights.families.base import EMBEDDING, HF_LAYER, OUTPUT
from megarl.peft.values import check_values

# PEFT fields whose every value is understood, or that do not change the computation.
UNDERSTOOD = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "target_modules", "target_parameters", "exclude_modules", "lora_alpha", "lora_dropout", "use_rslora",
    "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "megatron_config", "megatron_core",
    "loftq_config", "eva_config", "runtime_config", "init_lora_weights",
}  # fmt: skip
ALL_LINEAR = "all-linear"
# PEFT's ``init_lora_weights`` that leave the base model as it is.
HARMLESS_STARTS = (True, False, "gaussian", "orthogonal", "eva")
EMBED_MODULE, OUTPUT_MODULE = (names[1].removesuffix(".weight") for names in (EMBEDDING, OUTPUT))
# Before every module name in the weights file, and after the name of a base weight there.
PREFIX = "base_model.model."
BASE_WEIGHT = ".base_layer.weight"


def matrix_name(module: str, side: str) -> str:
    """PEFT's name, in the weights file, of a module's matrix A or B."""
    if module == EMBED_MODULE:
        return f"{PREFIX}{module}.lora_embedding_{side}"
    return f"{PREFIX}{module}.lora_{side}.weight"


# PEFT's settings that are often used and not implemented -> the way out.
WAYS_OUT = {
    "use_dora": "train without DoRA, or merge the adapter into the base with PEFT (merge_and_unload) and start there",
    "bias": "biases are base weights here and stay frozen: train with bias='none'",
    "lora_bias": "train with lora_bias=false; vLLM has no bias on an adapter either",
    "modules_to_save": "whole trained modules are no adapter: adapt embed_tokens and lm_head by target_modules instead",
    "trainable_token_indices": "adapt embed_tokens by target_modules instead",
    "layer_replication": "save the model with its layers replicated first",
}
# ``init_lora_weights`` that also change the base's weights.
CHANGED_BASE = (
    "it starts from a changed base model, which the adapter alone does not hold: let PEFT save it as plain LoRA "
    "(save_pretrained with path_initial_model_for_weight_conversion) and load that"
)


def check_supported(config: LoraConfig) -> None:
    """Refuse PEFT settings that would change the computation and are not implemented.

    Raises:
        AdapterError: a value that its field cannot have.
        UnsupportedError: naming the field, its value and what to do.
    """
    check_values(config)
    reference = LoraConfig()
    if config.init_lora_weights not in HARMLESS_STARTS:
        raise UnsupportedError(f"adapter config: init_lora_weights is {config.init_lora_weights!r}; {CHANGED_BASE}")
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in UNDERSTOOD and value != getattr(reference, field.name) and value:
            if field.name in WAYS_OUT:
                raise UnsupportedError(f"adapter config: {field.name} is {value!r}; {WAYS_OUT[field.name]}")
            supported = ", ".join(
                sorted(UNDERSTOOD - {"megatron_config", "megatron_core", "loftq_config", "eva_config"})
            )
            raise UnsupportedError(
                f"adapter config: {field.name} is {value!r}, which is not supported (are: {supported})"
            )


def resolve_targets(config: LoraConfig, weights: WeightMap) -> dict[str, str]:
    """What ``config`` adapts, by PEFT's own matching.

    Args:
        config: ``target_modules`` is a list of names, a regular expression or ``"all-linear"``; ``target_parameters`` a
            list of names.
        weights: the model's names.

    Returns:
        Full name of each adapted linear -> the name by which ``rank_pattern`` and ``alpha_pattern`` match it: its own,
        or that of its parameter in transformers 5. Gate and up of an expert that are of one parameter share A.

    Raises:
        AdapterError: a target, or the expression, matches nothing, or something that is not a linear layer.
        UnsupportedError: it matches a part of the experts only, or what PEFT cannot name.
    """
    config = as_read(config, weights)
    parameters = resolve_parameters(config, weights)
    modules = _resolve_modules(config, weights) if config.target_modules or not parameters else set()
    if both := sorted(modules & parameters.keys()):
        raise AdapterError(
            f"adapter config: target_modules and target_parameters both adapt '{both[0]}'; take it out of one of them"
        )
    return {name: name for name in modules} | parameters


def _resolve_modules(config: LoraConfig, weights: WeightMap) -> set[str]:
    """The full names of the modules that ``target_modules`` matches."""
    names = weights.target_names()
    if not config.target_modules:
        raise AdapterError("adapter config: target_modules is empty; give module names or 'all-linear'")
    config = spelt_out(config, weights)
    # Neither is in "all-linear", as in PEFT.
    names, shadowed = [*names, EMBED_MODULE, OUTPUT_MODULE], weights.shadowed_names()
    if not isinstance(config.target_modules, str):
        for target in sorted(config.target_modules):
            if not any(name == target or name.endswith(f".{target}") for name in [*names, *shadowed]):
                known = short_names(names)
                raise AdapterError(
                    f"adapter config: target_modules has '{target}', which the model lacks{nearest(target, known)} "
                    f"(it has: {', '.join(known)})"
                )
    chosen = {name for name in names if _matches(config, name)}
    shadowed = {name for name in shadowed if _matches(config, name)}
    if not chosen and not shadowed:
        raise AdapterError(
            f"adapter config: target_modules {config.target_modules!r} matches no linear layer "
            f"(the model has: {', '.join(short_names(names))})"
        )
    check_experts(config, weights, chosen, shadowed)
    check_expression(config, weights, chosen)
    _check_containers(config, weights)
    return chosen


def _check_containers(config: LoraConfig, weights: WeightMap) -> None:
    """PEFT raises where an expression matches a module that is not linear; such an adapter would not load there."""
    containers = {"model", "model.norm", "model.rotary_emb"}
    for layer in range(weights.num_layers):
        containers |= {
            f"{HF_LAYER.format(layer)}{vector.hf.removesuffix('.weight')}" for vector in weights.vectors(layer)
        }
    for name in weights.linear_names():
        parts = name.split(".")
        containers |= {".".join(parts[:depth]) for depth in range(1, len(parts))}
    for name in sorted(containers):
        if _matches(config, name):
            raise AdapterError(
                f"adapter config: target_modules {config.target_modules!r} matches '{name}', which is no linear layer; "
                "make it match linear layers only"
            )


def spelt_out(config: LoraConfig, weights: WeightMap) -> LoraConfig:
    """The config with a list of names for ``all-linear``, as PEFT saves it."""
    if config.target_modules != ALL_LINEAR:
        return config
    return dataclasses.replace(config, target_modules=short_names(weights.target_names()))


def settle_patterns(config: LoraConfig, weights: WeightMap) -> LoraConfig:
    """The config with patterns that mean the same in any order.

    The first key that fits wins (``peft.utils.other.get_pattern_key``), but PEFT sorts the keys when it saves. Where
    another one would win then, the keys become the full names of what is adapted.
    """
    config, changed = as_read(config, weights), {}
    keys = sorted(set(resolve_targets(config, weights).values()))
    for field in ("rank_pattern", "alpha_pattern"):
        pattern = getattr(config, field)
        meant = {key: pattern.get(get_pattern_key(list(pattern), key)) for key in keys if len(pattern) > 1}
        if any(pattern.get(get_pattern_key(sorted(pattern), key)) != value for key, value in meant.items()):
            changed[field] = {re.escape(key): value for key, value in meant.items() if value is not None}
    return dataclasses.replace(config, **changed) if changed else config


def rank_and_scaling(config: LoraConfig, name: str) -> tuple[int, float]:
    """Rank and scaling of what is adapted, as PEFT resolves ``rank_pattern``, ``alpha_pattern`` and rsLoRA.

    rsLoRA scales by alpha / sqrt(r) (Kalajdzievski, arXiv:2312.03732).

    Args:
        config: from ``as_read``.
        name: a value of ``resolve_targets``.
    """
    rank = config.rank_pattern.get(get_pattern_key(list(config.rank_pattern), name), config.r)
    alpha = config.alpha_pattern.get(get_pattern_key(list(config.alpha_pattern), name), config.lora_alpha)
    return rank, alpha / (math.sqrt(rank) if config.use_rslora else rank)


def unties(hf_config: Mapping[str, Any], chosen: Iterable[str]) -> bool:
    """Whether a merge of the adapter makes two of tied embeddings: one gains what the other does not."""
    return bool(hf_config.get("tie_word_embeddings")) and not {EMBED_MODULE, OUTPUT_MODULE}.isdisjoint(chosen)


def short_names(names: Iterable[str]) -> list[str]:
    """Sorted distinct last components (``q_proj``)."""
    return sorted({name.rpartition(".")[2] for name in names})


def _matches(config: LoraConfig, name: str) -> bool:
    found = check_target_module_exists(config, name)
    return bool(found) and type(found).__name__ != "_ExcludedModule"
