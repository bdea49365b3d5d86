# SPDX-License-Identifier: Apache-2.0
"""Which adapters of routers and routed experts are exact in PEFT and vLLM too; the others are refused by name.

With ``target_modules`` adapter files hold one A and one B for each linear of each expert, as vLLM loads them.
transformers 5 stacks all experts of a layer in two parameters; PEFT (0.21) converts such a file for them when it loads
it, but only if every expert of every layer is adapted in all three linears, at the common rank and alpha.

The names of those linears (``gate_proj``) mean the routed experts' alone, in a list as in ``"all-linear"``: so PEFT
reads them, even with the path of a shared expert or of a dense layer's MLP before them (``WeightMap.shadowed_names``).
"""

from peft import LoraConfig
from peft.utils.other import get_pattern_key

from megarl.errors import UnsupportedError
from megarl.families import WeightMap

# What PEFT's ``target_parameters`` may name instead; see ``parameter_targets``.
PARAMETERS = "gate_up_proj, down_proj or gate.weight"


def check_experts(config: LoraConfig, names: WeightMap, chosen: set[str], shadowed: set[str]) -> None:
    """Refuse what PEFT would compute differently or could not load.

    Args:
        config: the adapter's.
        names: the model's names.
        chosen: full names of the adapted linears.
        shadowed: those of ``names.shadowed_names()`` that the config matches.

    Raises:
        UnsupportedError: naming the field and what is supported.
    """
    routers, experts = names.router_names(), names.expert_names()
    if not (chosen & (routers | experts) or shadowed):
        return
    _check_paths(config, experts, shadowed)
    for kind, all_of, meant in (("router", routers, chosen), ("routed experts", experts, chosen | shadowed)):
        if left := sorted(all_of - chosen) if meant & (all_of | shadowed) else []:
            raise UnsupportedError(
                f"adapter config: target_modules adapts a part of the {kind} only (not '{left[0]}'); supported is "
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
    """Refuse an expression that PEFT would widen: with experts it keeps the last components of what matched.

    See ``_resolve_string_target_modules`` in ``peft/utils/transformers_weight_conversion.py``.

    Args:
        config: the adapter's.
        names: the model's names.
        chosen: what the expression itself matches.

    Raises:
        UnsupportedError: naming what PEFT would adapt too.
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
    """Whole experts and routers are named by bare names only."""
    if isinstance(config.target_modules, str):
        raise UnsupportedError(
            "adapter config: target_modules is an expression that matches routers or experts, or linears of their "
            "names; give a list of names"
        )
    for target in sorted(config.target_modules or ()):
        if "." in target and (found := sorted(name for name in shadowed if f".{name}".endswith(f".{target}"))):
            bare = ", ".join(sorted({name.rpartition(".")[2] for name in experts}))
            raise UnsupportedError(
                f"adapter config: target_modules has '{target}', but PEFT cannot adapt '{found[0]}': it takes the name "
                f"for the routed experts'; supported are {bare} without a path, which adapt the routed experts, and "
                f"'{found[0].partition('.layers.')[2].partition('.')[2]}.weight' in target_parameters"
            )
