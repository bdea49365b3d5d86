# SPDX-License-Identifier: Apache-2.0
"""Qwen3-MoE: Qwen3's attention, and experts instead of the MLP in all layers except those in config.json."""

from collections.abc import Mapping
from typing import Any

from megarl.families.base import READ_BY_ALL, Family, MoeMap
from megarl.families.dense import ATTENTION, MLP, NORMS
from megarl.families.moe import TINY_EXPERTS, expert_settings, experts, router, says_dense, sparse_by_step
from megarl.families.qwen3 import ATTENTION_KEYS, QK_NORMS, SAMPLER, attention_settings


def _settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    pattern = [int(sparse_by_step(hf, layer)) for layer in range(hf["num_hidden_layers"])]
    experts_of = expert_settings(hf, MOE, renormalise=hf["norm_topk_prob"])
    return attention_settings(hf) | experts_of | {"moe_layer_freq": pattern}


MOE = MoeMap(
    linears=(router("mlp.gate"),),
    experts=experts("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj"),
    sparse=sparse_by_step,
    says_dense=says_dense,
)
READS = READ_BY_ALL | ATTENTION_KEYS | {
    "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
    "mlp_only_layers", "decoder_sparse_step", "max_window_layers",
}  # fmt: skip
FAMILY = Family(
    ("qwen3_moe",),
    READS,
    ATTENTION,
    MLP,
    NORMS + QK_NORMS,
    _settings,
    MOE,
    window=lambda hf, layer: hf["sliding_window"],
    sampler=SAMPLER,
    tiny=TINY_EXPERTS,
)
