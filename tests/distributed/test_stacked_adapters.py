# SPDX-License-Identifier: Apache-2.0
"""Train PEFT's adapters of stacked experts (``target_parameters``): logprobs, gradients and updates equal PEFT's."""

from typing import Any

import pytest

from megarl.verify.run import verify_places
from tests.helpers.cases import check, make_case, place

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
SHARED = [f"mlp.shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")]
CASES: dict[str, dict[str, Any]] = {
    # One A of rank r for gate and up; ranks and alphas of their own; rsLoRA; the router.
    "qwen3-moe": {
        "family": "qwen3_moe",
        "adapter": {
            "target_modules": ATTENTION,
            "target_parameters": ["gate_up_proj", "mlp.experts.down_proj", "gate.weight"],
            "rank_pattern": {"down_proj": 3, r"layers\.1\.mlp\.experts\.gate_up_proj": 6, "gate.weight": 2},
            "alpha_pattern": {"gate_up_proj": 5, "o_proj": 3},
            "use_rslora": True,
        },
    },
    # Names of the experts beside a parameter, as "all-linear" has them: PEFT doubles the rank of gate and up.
    "mixtral": {
        "family": "mixtral",
        "adapter": {"target_modules": [*ATTENTION, "w1", "w2", "w3"], "target_parameters": ["gate.weight"]},
    },
    # A shared expert, and its own gate.
    "qwen2-moe": {
        "family": "qwen2_moe",
        "adapter": {
            "target_modules": ["o_proj", "shared_expert_gate", "up_proj", "down_proj"],
            "target_parameters": ["shared_expert.gate_proj.weight", "gate_up_proj", "experts.down_proj", "gate.weight"],
            "rank_pattern": {"shared_expert.up_proj": 3},
            "use_rslora": True,
        },
    },
    # Only here do shared experts and the MLP of the layer without experts have adapters; only some of the layers.
    "deepseek": {
        "family": "deepseek_v3",
        "adapter": {
            "target_modules": ["o_proj"],
            "target_parameters": [*SHARED, "0.mlp.up_proj.weight", "1.mlp.experts.gate_up_proj", "experts.down_proj"],
        },
    },
}
LAUNCHES: list[dict[str, dict[str, Any]]] = [
    {"EP2xDP2": {"expert": 2, "data": 2}, "TP2+SPxETP2": {"tensor": 2, "expert_tensor": 2}, "PP2": {"pipeline": 2}},
    {
        "TP2+SPxEP2xETP2xDP2": {"tensor": 2, "expert": 2, "expert_tensor": 2, "data": 2},
        "EP4xDP4": {"expert": 4, "data": 4},
    },
]


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stacked")
    return [make_case(folder, name, tied=False, num_hidden_layers=2, **settings) for name, settings in CASES.items()]


@pytest.mark.parametrize(
    "layouts",
    [LAUNCHES[0], pytest.param(LAUNCHES[1], marks=pytest.mark.long)],
    ids=lambda layouts: ",".join(layouts),
)
def test_stacked_adapters_equal_pefts(cases, layouts):
    check(verify_places([place(case, name, layout) for name, layout in layouts.items() for case in cases]))
