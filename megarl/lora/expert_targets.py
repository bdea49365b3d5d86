"""Which adapters of routers and routed experts are exact in PEFT and vLLM too; the others are refused by name.

Adapter files hold one A and one B for each linear of each expert, as vLLM loads them. transformers 5 stacks all experts
of a layer in two parameters; PEFT (0.21) converts such a file for them when it loads it, but only if every expert of
every layer is adapted in all three linears, at the common rank and alpha.
"""

from peft import LoraConfig
from peft.utils.other import get_pattern_key

from megarl.errors import UnsupportedError
from megarl.model.families import WeightMap


def check_experts(config: LoraConfig, names: WeightMap, chosen: set[str]) -> None:
    """Refuse what PEFT would compute differently or could not load.

    Args:
        config: the adapter's.
        names: the model's names.
        chosen: full names of the adapted linears.

    Raises:
        UnsupportedError: naming the field and what is supported.
    """
    routers, experts = names.router_names(), names.expert_names()
    if not chosen & (routers | experts):
        return
    for kind, all_of in (("router", routers), ("routed experts", experts)):
        if left := sorted(all_of - chosen) if chosen & all_of else []:
            raise UnsupportedError(
                f"adapter config: target_modules adapts a part of the {kind} only (not '{left[0]}'); supported is "
                "all of them, in all layers, or none: list all of their names"
            )
    dense = sorted(chosen & names.dense_mlp_names())
    if dense and chosen & experts:
        raise UnsupportedError(
            f"adapter config: target_modules adapts the experts and '{dense[0]}' of a layer without experts, which "
            "PEFT cannot hold in one adapter; adapt the attention only"
        )
    if isinstance(config.target_modules, str) and config.target_modules != "all-linear":
        raise UnsupportedError(
            "adapter config: target_modules is an expression that matches routers or experts; give a list of names"
        )
    if config.lora_dropout:
        raise UnsupportedError(
            f"adapter config: lora_dropout is {config.lora_dropout} with routers or experts as targets; PEFT "
            "and megarl support 0 there"
        )
    if config.use_rslora and chosen & experts:
        raise UnsupportedError(
            "adapter config: use_rslora is true with experts as targets; PEFT scales fused gate and up projections "
            "differently from vLLM then; set lora_alpha instead"
        )
    for field in ("rank_pattern", "alpha_pattern"):
        pattern = getattr(config, field)
        for name in sorted(chosen & (routers | experts)):
            if get_pattern_key(list(pattern), name) != name:
                raise UnsupportedError(
                    f"adapter config: {field} matches '{name}'; routers and experts support the common value only"
                )
