# SPDX-License-Identifier: Apache-2.0
"""Qwen2-MoE (Qwen1.5-MoE, Qwen2-57B-A14B): Qwen2's attention; experts in all layers except those in config.json.

Besides the routed experts each of these layers has a shared expert. A gate, one number per token, scales its output by
the gate's sigmoid. PEFT (0.21) does not translate names in this family, as it does in other mixtures. In
``target_modules``, ``gate_proj`` therefore means the shared expert's; so does ``all-linear``, which also includes
``shared_expert_gate``. Routed experts and routers can be named in ``target_parameters`` only.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megarl.families.base import READ_BY_ALL, Family, LinearMap, MoeMap
from megarl.families.dense import MLP, NORMS, OUT, QKV
from megarl.families.moe import (
    TINY_EXPERTS,
    expert_settings,
    experts,
    router,
    says_dense,
    shared_experts,
    sparse_by_step,
)
from megarl.families.qwen2 import layer_window


def _qkv_bias(hf: Mapping[str, Any], layer: int) -> bool:
    return bool(hf["qkv_bias"])


def _settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    return expert_settings(hf, MOE, renormalise=hf["norm_topk_prob"]) | {
        "add_qkv_bias": hf["qkv_bias"],
        "moe_layer_freq": [int(sparse_by_step(hf, layer)) for layer in range(hf["num_hidden_layers"])],
        "moe_shared_expert_intermediate_size": hf["shared_expert_intermediate_size"],
        "moe_shared_expert_gate": True,
    }


INNER = "shared_expert_intermediate_size"
MOE = MoeMap(
    linears=(
        router("mlp.gate"),
        *shared_experts("mlp.shared_expert"),
        LinearMap("mlp.shared_experts.gate", ("mlp.shared_expert_gate",), "replicated"),
    ),
    experts=experts("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj"),
    sparse=sparse_by_step,
    says_dense=says_dense,
    by_module=False,
)
READS = READ_BY_ALL | {
    "head_dim", "qkv_bias", "use_sliding_window", "sliding_window", "max_window_layers", "layer_types", "num_experts",
    "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
    "norm_topk_prob", "mlp_only_layers", "decoder_sparse_step",
}  # fmt: skip
FAMILY = Family(
    ("qwen2_moe",),
    READS,
    (replace(QKV, bias=_qkv_bias), OUT),
    MLP,
    NORMS,
    _settings,
    MOE,
    window=layer_window,
    splits=lambda hf: {INNER: hf.get(INNER)},
    tiny=TINY_EXPERTS | {INNER: 24},
)
