# SPDX-License-Identifier: Apache-2.0
"""Mixtral: Llama's attention, with a mixture of experts instead of the MLP in every layer."""

from collections.abc import Mapping
from typing import Any

from megarl.errors import UnsupportedError
from megarl.families.base import READ_BY_ALL, Family, MoeMap, SamplerSupport
from megarl.families.dense import ATTENTION, NORMS
from megarl.families.moe import TINY_EXPERTS, expert_settings, experts, router

_BLOCK = "block_sparse_moe"


def _settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    if hf["router_jitter_noise"]:
        raise UnsupportedError(f"config.json: router_jitter_noise is {hf['router_jitter_noise']}; supported is 0")
    return expert_settings(hf, MOE, renormalise=True)


MOE = MoeMap(
    linears=(router(f"{_BLOCK}.gate"),),
    experts=experts(f"{_BLOCK}.experts.{{}}.w1", f"{_BLOCK}.experts.{{}}.w3", f"{_BLOCK}.experts.{{}}.w2"),
    sparse=lambda hf, layer: True,
    inner_key="intermediate_size",
)
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
    MOE,
    window=lambda hf, layer: hf["sliding_window"],
    sampler=SamplerSupport(window=lambda raw: raw.get("sliding_window")),
    tiny=TINY_EXPERTS,
)
