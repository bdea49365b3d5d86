# SPDX-License-Identifier: Apache-2.0
"""Resolve the layers that a PEFT config adapts, with rank and scaling. Pure decisions, before anything is changed."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from megarl.errors import AdapterError, nearest
from megarl.families import WeightMap
from megarl.families.base import EMBEDDING, HF_LAYER, OUTPUT
from megarl.lora.targets.experts import check_experts, check_expression
from megarl.lora.targets.parameters import as_peft_reads, resolve_parameters

ALL_LINEAR = "all-linear"
EMBED_MODULE, OUTPUT_MODULE = (names[1].removesuffix(".weight") for names in (EMBEDDING, OUTPUT))


def resolve_targets(config: LoraConfig, weights: WeightMap) -> dict[str, str]:
    """Map the linears that ``config`` adapts, by PEFT's own matching, to the names that its patterns match.

    Args:
        config: PEFT's config. ``target_modules`` is a list of names, a regular expression or ``"all-linear"``;
            ``target_parameters`` is a list of names.
        weights: the model's tensor names.

    Returns:
        Full name of each adapted linear -> the name that ``rank_pattern`` and ``alpha_pattern`` are compared with: its
        own, or that of its parameter in transformers 5. Gate and up of an expert in one parameter share A.

    Raises:
        AdapterError: a target or the expression matches nothing, or something that is not a linear layer.
        UnsupportedError: a target matches only a part of the experts, or something that PEFT cannot name.
    """
    config = as_peft_reads(config, weights)
    parameters = resolve_parameters(config, weights)
    modules = _resolve_modules(config, weights) if config.target_modules or not parameters else set()
    if both := sorted(modules & parameters.keys()):
        raise AdapterError(
            f"adapter config: target_modules and target_parameters both adapt '{both[0]}'; take it out of one of them"
        )
    return {name: name for name in modules} | parameters


def _resolve_modules(config: LoraConfig, weights: WeightMap) -> set[str]:
    """Return the full names of the modules that ``target_modules`` matches."""
    names = weights.target_names()
    if not config.target_modules:
        raise AdapterError("adapter config: target_modules is empty; give module names or 'all-linear'")
    config = expand_all_linear(config, weights)
    # "all-linear" includes neither embedding nor output layer, as in PEFT.
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
    """Refuse an expression that matches a module which is not linear: PEFT would raise on such an adapter."""
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


def expand_all_linear(config: LoraConfig, weights: WeightMap) -> LoraConfig:
    """Replace ``all-linear`` by the list of names that PEFT saves."""
    if config.target_modules != ALL_LINEAR:
        return config
    return dataclasses.replace(config, target_modules=short_names(weights.target_names()))


def order_independent(config: LoraConfig, weights: WeightMap) -> LoraConfig:
    """Return the config with patterns that mean the same in any order; see ``with_stable_patterns``."""
    config = as_peft_reads(config, weights)
    return with_stable_patterns(config, set(resolve_targets(config, weights).values()))


def with_stable_patterns(config: LoraConfig, adapted: Iterable[str]) -> LoraConfig:
    """Return the config with patterns that mean the same in any order.

    The first matching key wins (``peft.utils.other.get_pattern_key``), but PEFT sorts the keys when it saves. If
    another key would win then, the keys are replaced by the full names of the adapted linears.

    Args:
        config: PEFT's config.
        adapted: names that PEFT compares the patterns with.
    """
    changed, keys = {}, sorted(adapted)
    for field in ("rank_pattern", "alpha_pattern"):
        pattern = getattr(config, field)
        meant = {key: pattern.get(get_pattern_key(list(pattern), key)) for key in keys if len(pattern) > 1}
        if any(pattern.get(get_pattern_key(sorted(pattern), key)) != value for key, value in meant.items()):
            changed[field] = {re.escape(key): value for key, value in meant.items() if value is not None}
    return dataclasses.replace(config, **changed) if changed else config


def unties(hf_config: Mapping[str, Any], chosen: Iterable[str]) -> bool:
    """Return True if merging the adapter unties tied embeddings, because one of them changes and the other does not."""
    return bool(hf_config.get("tie_word_embeddings")) and not {EMBED_MODULE, OUTPUT_MODULE}.isdisjoint(chosen)


def short_names(names: Iterable[str]) -> list[str]:
    """Return the sorted distinct last components of names (``q_proj``)."""
    return sorted({name.rpartition(".")[2] for name in names})


def _matches(config: LoraConfig, name: str) -> bool:
    match = check_target_module_exists(config, name)
    return bool(match) and type(match).__name__ != "_ExcludedModule"
