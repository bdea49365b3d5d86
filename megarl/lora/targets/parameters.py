# SPDX-License-Identifier: Apache-2.0
"""Resolve PEFT's ``target_parameters``: weights by their names in transformers 5, which stacks a layer's experts.

An adapter of a stacked parameter (``ParamWrapper`` in PEFT 0.21) has one A and one B for each expert. Gate and up are
one parameter: they share A, ``[r, in]``, and B is ``[2 * inner, r]``. PEFT turns the names of experts and routers in
``target_modules`` (``"all-linear"`` too) into such parameters, and doubles rank and alpha of gate and up.
"""

import dataclasses
import re

from peft import LoraConfig

from megarl.errors import AdapterError, UnsupportedError, nearest
from megarl.families import WeightMap
from megarl.families.base import DOWN, EMBEDDING, GATE_UP, HF_LAYER, OUTPUT, STACKED_ROUTER

ROUTER = f"{STACKED_ROUTER.rpartition('.')[2]}.weight"


def as_peft_reads(config: LoraConfig, weights: WeightMap) -> LoraConfig:
    """Return the config as PEFT reads it: with ``target_parameters``, experts and routers always become parameters.

    Raises:
        AdapterError, UnsupportedError: see ``as_parameters``.
    """
    return as_parameters(config, weights) if config.target_parameters else config


def as_parameters(config: LoraConfig, weights: WeightMap) -> LoraConfig:
    """Move experts and routers from ``target_modules`` to ``target_parameters``, as PEFT (0.21) converts them.

    Follows ``_convert_peft_config_moe`` in ``peft/utils/transformers_weight_conversion.py``.

    Args:
        config: the adapter's config; returned unchanged if ``target_modules`` can name no experts.
        weights: the model's tensor names.

    Raises:
        AdapterError: gate is named without up, or up without gate.
        UnsupportedError: ``target_modules`` is an expression.
    """
    mapping = expert_leaves(weights)
    if not mapping:
        return config
    if isinstance(config.target_modules, str):
        raise UnsupportedError(
            f"adapter config: target_modules is the expression '{config.target_modules}' where experts are "
            "target_parameters; give a list of names"
        )
    fused = {leaf for leaf, parameter in mapping.items() if parameter == GATE_UP}
    kept, parameters, halves = set(), set(config.target_parameters or ()), set()
    for target in config.target_modules or ():
        leaf = target.rpartition(".")[2]
        if leaf in mapping:
            parameters.add(mapping[leaf])
            halves |= {leaf} & fused
        elif leaf not in (GATE_UP, "weight"):  # PEFT keeps both when it resolves an expression
            kept.add(target)
    if halves and halves != fused:
        [missing] = fused - halves
        raise AdapterError(
            f"adapter config: target_modules has '{halves.pop()}' without '{missing}'; transformers stacks them, and "
            "PEFT adapts both or none: name both"
        )
    patterns = {"rank_pattern": dict(config.rank_pattern), "alpha_pattern": dict(config.alpha_pattern)}
    if halves:
        key = rf".*\.{re.escape(GATE_UP)}"
        patterns["rank_pattern"][key], patterns["alpha_pattern"][key] = 2 * config.r, 2 * config.lora_alpha
    return dataclasses.replace(config, target_modules=kept, target_parameters=sorted(parameters), **patterns)


def expert_leaves(weights: WeightMap) -> dict[str, str]:
    """Map the last components of names of expert linears and routers to PEFT's parameters; empty if PEFT has none."""
    moe = weights.family.moe
    if moe is None or not moe.by_module:
        return {}
    gate_up, down = ([hf.rpartition(".")[2] for hf in linear.hf] for linear in moe.experts)
    routers = [hf.rpartition(".")[2] for linear in moe.linears if linear.is_router for hf in linear.hf]
    return dict.fromkeys(gate_up, GATE_UP) | dict.fromkeys(down, DOWN) | dict.fromkeys(routers, ROUTER)


def resolve_parameters(config: LoraConfig, weights: WeightMap) -> dict[str, str]:
    """Map each linear that ``target_parameters`` adapts to the name of its parameter, which PEFT's patterns match.

    PEFT matches a whole name, or its end after a dot. ``layers_to_transform`` and ``exclude_modules`` have no effect.

    Args:
        config: the adapter's config, from ``as_peft_reads``.
        weights: the model's tensor names.

    Raises:
        AdapterError: a name matches nothing.
        UnsupportedError: a name matches something other than a linear; or there is dropout, which PEFT refuses here
            too.
    """
    if not config.target_parameters:
        return {}
    if config.lora_dropout:
        raise UnsupportedError(
            f"adapter config: lora_dropout is {config.lora_dropout} with target_parameters, where dropout is not "
            "defined (PEFT refuses it too); set it to 0"
        )
    parameters, others = weights.parameter_names(), _others(weights)
    resolved: dict[str, str] = {}
    for target in sorted(set(config.target_parameters)):
        if wrong := [name for name in others if f".{name}".endswith(f".{target}")]:
            raise UnsupportedError(
                f"adapter config: target_parameters has '{target}', which matches '{wrong[0]}'; supported are the "
                "weights of attention, MLPs, experts and routers (adapt embed_tokens and lm_head by target_modules)"
            )
        hits = [name for name in parameters if f".{name}".endswith(f".{target}")]
        if not hits:
            known = sorted({".".join(name.split(".")[3:]) for name in parameters})
            raise AdapterError(
                f"adapter config: target_parameters has '{target}', which the model lacks{nearest(target, known)} "
                f"(it has: {', '.join(known)})"
            )
        resolved |= {linear: name for name in hits for linear in parameters[name]}
    return resolved


def _others(weights: WeightMap) -> list[str]:
    """Return the names of parameters that are not linears of a layer."""
    vectors = [
        f"{HF_LAYER.format(layer)}{vector.hf}"
        for layer in range(weights.num_layers)
        for vector in weights.vectors(layer)
    ]
    return [EMBEDDING[1], OUTPUT[1], "model.norm.weight", *vectors]
