# SPDX-License-Identifier: Apache-2.0
"""Parts shared by the mixture-of-experts families: mcore's names of router and experts, and mcore's settings."""

from collections.abc import Mapping
from typing import Any

from megarl.errors import ModelError, UnsupportedError
from megarl.families.base import ROUTER, TINY, LinearMap, MoeMap

TINY_EXPERTS = TINY | {"moe_intermediate_size": 24, "num_experts": 4, "num_local_experts": 4}


def router(hf: str) -> LinearMap:
    """Map the router; ``hf`` is its Hugging Face path below the layer."""
    return LinearMap(ROUTER, (hf,), "replicated")


def experts(gate: str, up: str, down: str) -> tuple[LinearMap, LinearMap]:
    """Templates of one expert's linears; the arguments are their Hugging Face paths below the layer."""
    return (
        LinearMap("mlp.experts.local_experts.{}.linear_fc1", (gate, up), "column", "gated"),
        LinearMap("mlp.experts.local_experts.{}.linear_fc2", (down,), "row"),
    )


def shared_experts(hf: str) -> tuple[LinearMap, LinearMap]:
    """Map the shared experts, which every token passes and which form one MLP; ``hf`` is their path below the layer."""
    return (
        LinearMap("mlp.shared_experts.linear_fc1", (f"{hf}.gate_proj", f"{hf}.up_proj"), "column", "gated"),
        LinearMap("mlp.shared_experts.linear_fc2", (f"{hf}.down_proj",), "row"),
    )


def sparse_by_step(hf: Mapping[str, Any], layer: int) -> bool:
    """Test for experts in Qwen's families: every ``decoder_sparse_step``-th layer, except ``mlp_only_layers``."""
    return layer not in (hf["mlp_only_layers"] or ()) and (layer + 1) % hf["decoder_sparse_step"] == 0


def says_dense(raw: Mapping[str, Any]) -> bool:
    """Test whether a config.json of Qwen's families, complete or not, gives some layers no experts."""
    return bool(raw.get("mlp_only_layers")) or (raw.get("decoder_sparse_step") or 1) > 1


def expert_settings(hf: Mapping[str, Any], moe: MoeMap, *, renormalise: bool) -> dict[str, Any]:
    """Return ``TransformerConfig`` arguments of a softmax top-k mixture without auxiliary losses and token dropping.

    Args:
        hf: parsed config.json.
        moe: the family's mixture.
        renormalise: True if the chosen experts' probabilities are scaled to add up to 1, which equals a softmax over
            the chosen logits.

    Raises:
        ModelError: a token uses more experts than there are.
        UnsupportedError: a token uses one expert and weights are renormalised, so that its weight is always 1.
    """
    count, chosen = moe.count(hf), hf["num_experts_per_tok"]
    if chosen > count:
        raise ModelError(f"config.json: num_experts_per_tok ({chosen}) exceeds the {count} experts of a layer")
    if chosen == 1 and renormalise:
        # Scaled to add up to 1, the weight of a single expert is 1 whatever the router computes; mcore has no such
        # mixture.
        raise UnsupportedError(
            "config.json: num_experts_per_tok is 1 where weights are scaled to add up to 1 (norm_topk_prob); supported "
            "are 2 or more, or weights that are not scaled"
        )
    return {
        "num_moe_experts": count,
        "moe_router_topk": chosen,
        "moe_ffn_hidden_size": hf[moe.inner_key],
        "moe_router_pre_softmax": not renormalise,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": False,
        "moe_permute_fusion": False,
    }
