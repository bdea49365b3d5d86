"""Mixtral: Llama's attention, and in every layer a mixture of experts in place of the MLP."""

from collections.abc import Mapping
from typing import Any

from megarl.errors import UnsupportedError
from megarl.model.weights.families.base import READ_BY_ALL, Family, MoeMap
from megarl.model.weights.families.dense import ATTENTION, NORMS
from megarl.model.weights.families.moe import expert_settings, experts, num_experts, router

_BLOCK = "block_sparse_moe"


def _settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    if hf["router_jitter_noise"]:
        raise UnsupportedError(f"config.json: router_jitter_noise is {hf['router_jitter_noise']}; supported is 0")
    return expert_settings(hf, hidden=hf["intermediate_size"], renormalise=True)


READS = READ_BY_ALL | {
    "head_dim", "sliding_window", "num_local_experts", "num_experts", "num_experts_per_tok", "router_jitter_noise",
}  # fmt: skip
FAMILY = Family(
    ("mixtral",),
    READS,
    ATTENTION,
    (),
    NORMS,
    _settings,
    MoeMap(
        linears=(router(f"{_BLOCK}.gate"),),
        experts=experts(f"{_BLOCK}.experts.{{}}.w1", f"{_BLOCK}.experts.{{}}.w3", f"{_BLOCK}.experts.{{}}.w2"),
        count=num_experts,
        sparse=lambda hf, layer: True,
    ),
    window=lambda hf, layer: hf["sliding_window"],
)
