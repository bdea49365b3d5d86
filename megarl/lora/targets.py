"""Which layers a PEFT config adapts, at which rank and scaling: pure decisions, before anything is changed."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from megarl.errors import AdapterError, UnsupportedError, nearest
from megarl.lora.expert_targets import check_experts
from megarl.model.families import WeightMap
from megarl.model.families.base import EMBEDDING, HF_LAYER, OUTPUT

# PEFT fields whose every value is understood, or that do not change the computation.
UNDERSTOOD = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "use_rslora", "layers_to_transform",
    "layers_pattern", "rank_pattern", "alpha_pattern", "megatron_config", "megatron_core", "loftq_config",
    "runtime_config", "init_lora_weights",
}  # fmt: skip
ALL_LINEAR = "all-linear"
EMBED_MODULE, OUTPUT_MODULE = (names[1].removesuffix(".weight") for names in (EMBEDDING, OUTPUT))
# Before every module name in the weights file, and after the name of a base weight there.
PREFIX = "base_model.model."
BASE_WEIGHT = ".base_layer.weight"


def matrix_name(module: str, side: str) -> str:
    """PEFT's name, in the weights file, of a module's matrix A or B."""
    if module == EMBED_MODULE:
        return f"{PREFIX}{module}.lora_embedding_{side}"
    return f"{PREFIX}{module}.lora_{side}.weight"


def check_supported(config: LoraConfig) -> None:
    """Refuse PEFT settings that would change the computation and are not implemented.

    Raises:
        UnsupportedError: naming the field, its value and what is supported.
    """
    reference = LoraConfig()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in UNDERSTOOD and value != getattr(reference, field.name) and value:
            supported = ", ".join(sorted(UNDERSTOOD - {"megatron_config", "megatron_core", "loftq_config"}))
            raise UnsupportedError(
                f"adapter config: {field.name} is {value!r}, which is not supported (are: {supported})"
            )


def resolve_targets(config: LoraConfig, weights: WeightMap) -> set[str]:
    """The full names of the modules that ``config`` adapts, by PEFT's own matching.

    Args:
        config: ``target_modules`` is a list of names, a regular expression or ``"all-linear"``.
        weights: the model's names.

    Raises:
        AdapterError: a listed target, or the expression, matches nothing, or something that is not a linear layer.
        UnsupportedError: it matches a part of the experts only, or what PEFT cannot name; or patterns that mean
            something else once PEFT has saved them.
    """
    names = weights.target_names()
    if not config.target_modules:
        raise AdapterError("adapter config: target_modules is empty; give module names or 'all-linear'")
    if config.target_modules == ALL_LINEAR:
        config = dataclasses.replace(config, target_modules=short_names(names))
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
    _check_containers(config, weights)
    _check_order(config, chosen)
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


def _check_order(config: LoraConfig, chosen: set[str]) -> None:
    """The first pattern that fits wins, but PEFT's files, and what the sampler is sent, have them sorted."""
    for field in ("rank_pattern", "alpha_pattern"):
        pattern = getattr(config, field)
        for name in sorted(chosen) if len(pattern) > 1 else ():
            first, once_saved = get_pattern_key(list(pattern), name), get_pattern_key(sorted(pattern), name)
            if pattern.get(first) != pattern.get(once_saved):
                raise UnsupportedError(
                    f"adapter config: {field} has '{first}' and '{once_saved}' for '{name}'; PEFT sorts them when it "
                    "saves, and the other one would win: make them exclude each other"
                )


def rank_and_scaling(config: LoraConfig, name: str) -> tuple[int, float]:
    """Rank and scaling of one adapted module, as PEFT resolves ``rank_pattern``, ``alpha_pattern`` and rsLoRA.

    rsLoRA scales by alpha / sqrt(r) (Kalajdzievski, arXiv:2312.03732).
    """
    rank = config.rank_pattern.get(get_pattern_key(list(config.rank_pattern), name), config.r)
    alpha = config.alpha_pattern.get(get_pattern_key(list(config.alpha_pattern), name), config.lora_alpha)
    return rank, alpha / (math.sqrt(rank) if config.use_rslora else rank)


def unties(hf_config: Mapping[str, Any], chosen: set[str]) -> bool:
    """Whether a merge of the adapter makes two of tied embeddings: one gains what the other does not."""
    return bool(hf_config.get("tie_word_embeddings")) and not chosen.isdisjoint({EMBED_MODULE, OUTPUT_MODULE})


def short_names(names: Iterable[str]) -> list[str]:
    """Sorted distinct last components (``q_proj``)."""
    return sorted({name.rpartition(".")[2] for name in names})


def _matches(config: LoraConfig, name: str) -> bool:
    found = check_target_module_exists(config, name)
    return bool(found) and type(found).__name__ != "_ExcludedModule"
