# SPDX-License-Identifier: Apache-2.0
"""Refuse adapters of routers and routed experts that PEFT or vLLM would compute differently.

With ``target_modules`` an adapter file holds one A and one B for each linear of each expert, as vLLM loads them.
transformers 5 stacks all experts of a layer in two parameters. PEFT (0.21) converts such a file when it loads it, but
only if all three linears of every expert of every layer are adapted, at the common rank and alpha.

The names of those linears (``gate_proj``) mean only the routed experts', in a list as in ``"all-linear"``. PEFT reads
them so even if the path of a shared expert or of a dense layer's MLP precedes them (``WeightMap.shadowed_names``).
"""

from peft import LoraConfig
from peft.utils.other import get_pattern_key

from megarl.errors import UnsupportedError
from megarl.families import WeightMap

# Alternatives for messages: what PEFT's ``target_parameters`` may name; see ``resolve_parameters``.
PARAMETERS = "gate_up_proj, down_proj or gate.weight"


def check_experts(config: LoraConfig, names: WeightMap, chosen: set[str], shadowed: set[str]) -> None:
    """Refuse adapters that PEFT would compute differently or could not load.

    Args:
        config: the adapter's config.
        names: the model's tensor names.
        chosen: full names of the adapted linears.
        shadowed: those of ``names.shadowed_names()`` that the config matches.

    Raises:
        UnsupportedError: the config has such an adapter; the message names the field and what is supported.
    """
    routers, experts = names.router_names(), names.expert_names()
    if not (chosen & (routers | experts) or shadowed):
        return
    _check_paths(config, experts, shadowed)
    for kind, all_of, meant in (("router", routers, chosen), ("routed experts", experts, chosen | shadowed)):
        if missing := sorted(all_of - chosen) if meant & (all_of | shadowed) else []:
            raise UnsupportedError(
                f"adapter config: target_modules adapts a part of the {kind} only (not '{missing[0]}'); supported is "
                f"all of them, in all layers, or none: list all of their names, or name {PARAMETERS} in "
                "target_parameters, which need no others"
            )
    if config.lora_dropout:
        raise UnsupportedError(
            f"adapter config: lora_dropout is {config.lora_dropout} with routers or experts as targets, where dropout "
            "is not defined (PEFT refuses it too); set it to 0"
        )
    if config.use_rslora and chosen & experts:
        raise UnsupportedError(
            "adapter config: use_rslora is true with experts among target_modules; PEFT scales stacked gate and up "
            f"projections differently from vLLM then; name {PARAMETERS} in target_parameters, or set lora_alpha instead"
        )
    for field in ("rank_pattern", "alpha_pattern"):
        pattern = getattr(config, field)
        for name in sorted(chosen & (routers | experts)):
            if get_pattern_key(list(pattern), name) != name:
                raise UnsupportedError(
                    f"adapter config: {field} matches '{name}'; routers and experts among target_modules have the "
                    f"common value; name {PARAMETERS} in target_parameters for ranks and alphas of their own"
                )


def check_expression(config: LoraConfig, names: WeightMap, chosen: set[str]) -> None:
    """Refuse a regular expression that PEFT would widen: with experts it keeps only the last components of the matches.

    See ``_resolve_string_target_modules`` in ``peft/utils/transformers_weight_conversion.py``.

    Args:
        config: the adapter's config.
        names: the model's tensor names.
        chosen: names that the expression itself matches.

    Raises:
        UnsupportedError: PEFT would adapt more; the message names it.
    """
    if not names.experts_by_module or not isinstance(config.target_modules, str):
        return
    leaves = {name.rpartition(".")[2] for name in chosen}
    wider = {name for name in names.target_names() if name.rpartition(".")[2] in leaves}
    if more := sorted(wider - chosen):
        raise UnsupportedError(
            f"adapter config: target_modules is an expression that PEFT widens in a mixture of experts: it would adapt "
            f"'{more[0]}' too; give a list of names and layers_to_transform"
        )


def _check_paths(config: LoraConfig, experts: set[str], shadowed: set[str]) -> None:
    """Refuse experts and routers that are named by an expression or with a path; only bare names mean whole ones."""
    if isinstance(config.target_modules, str):
        raise UnsupportedError(
            "adapter config: target_modules is an expression that matches routers or experts, or linears of their "
            "names; give a list of names"
        )
    for target in sorted(config.target_modules or ()):
        if "." in target and (wrong := sorted(name for name in shadowed if f".{name}".endswith(f".{target}"))):
            bare = ", ".join(sorted({name.rpartition(".")[2] for name in experts}))
            raise UnsupportedError(
                f"adapter config: target_modules has '{target}', but PEFT cannot adapt '{wrong[0]}': it takes the name "
                f"for the routed experts'; supported are {bare} without a path, which adapt the routed experts, and "
                f"'{wrong[0].partition('.layers.')[2].partition('.')[2]}.weight' in target_parameters"
            )
