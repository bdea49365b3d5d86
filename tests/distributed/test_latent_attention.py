# SPDX-License-Identifier: Apache-2.0
"""Promise 1 for DeepSeek-V2 and V3: multi-latent attention, shared experts and routing, in products of layouts."""

from typing import Any

import pytest

from megarl.verify.bounds import GRADIENTS, LOGPROBS
from megarl.verify.cases import Place
from megarl.verify.ranks import Stage, each_layout, train
from megarl.verify.reference.reference_runs import make_truth, run_shared
from megarl.verify.run import verify_places
from tests.helpers.cases import check, make_case, outside, place
from tests.helpers.models import rope
from tests.helpers.ranks import run_ranks

MODELS = {
    "v2-lite": {
        "family": "deepseek_v2",
        "tied": False,
        "rope_parameters": rope("yarn") | {"mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "v2": {
        "family": "deepseek_v2",
        "tied": False,
        "seed": 1,
        "q_lora_rank": 16,
        "n_routed_experts": 8,
        # A group is ranked by its best expert's score; mcore would add up the best 3 / 2.
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 2.0,
    },
    # With this seed every expert gets tokens. An expert without has zero gradients, for which a relative error is
    # undefined.
    "v3": {"family": "deepseek_v3", "tied": False, "seed": 3},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2+SP": {"tensor": 2},
    "PP2xVPP2": {"pipeline": 2, "virtual_pipeline": 2},
    "DP2xEP2": {"data": 2, "expert": 2},
    "CP2+selective": {"context": 2, "train": {"recompute": "selective"}},
    "TP2xPP2xEP2": {"tensor": 2, "pipeline": 2, "expert": 2},
    "TP2xCP2xEP2xETP2": {"tensor": 2, "context": 2, "expert": 2, "expert_tensor": 2},
}
# V3 has the most features that a layout could get wrong, and runs at every layout.
ONLY = {"v2-lite": ("PP2xVPP2", "DP2xEP2", "CP2+selective"), "v2": ("TP2+SP", "TP2xPP2xEP2")}


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("latent")
    cases = {name: make_case(folder, name, **model) for name, model in MODELS.items()}
    run_shared(make_truth, list(cases.values()))
    return cases


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(["TP2+SP", "PP2xVPP2", "DP2xEP2", "CP2+selective"], marks=pytest.mark.long),
        ["TP2xPP2xEP2", "TP2xCP2xEP2xETP2"],
    ],
    ids=str,
)
def test_logprobs_gradients_and_updates_equal_peft(cases, layouts):
    met = [(layout, name) for layout in layouts for name in cases if layout in ONLY.get(name, LAYOUTS)]
    check(verify_places([place(cases[name], layout, LAYOUTS[layout]) for layout, name in met]))


MUTATIONS = ("the rotary key's sum", "the bias on the choice")


def train_mutants(here: Place) -> dict[str, dict[str, str]]:
    """On each rank, return `megarl verify`'s findings out of bounds for V3 at TP2, with each part removed in turn."""
    from megarl.model.layers.attention import latent_attention
    from megarl.model.layers.experts.routers import GroupLimitedRouter

    results = {}
    for (stage, groups), name in zip(each_layout([Stage(here)] * len(MUTATIONS)), MUTATIONS, strict=True):
        with pytest.MonkeyPatch.context() as patch:
            if name == "the rotary key's sum":
                # Each rank keeps the gradient from its own heads, as in mcore's layer.
                patch.setattr(latent_attention, "copy_to_tensor_model_parallel_region", lambda tensor, group: tensor)
            else:
                choose = GroupLimitedRouter._in_best_groups
                patch.setattr(
                    GroupLimitedRouter,
                    "_in_best_groups",
                    lambda router, scores, choose=choose: choose(router, scores - router.expert_bias),
                )
            results[name] = outside(train(stage.place, groups))
    return results


def test_what_would_be_silent_errors_fail_rows(cases):
    failed = run_ranks(train_mutants, 2, place(cases["v3"], "TP2+SP", LAYOUTS["TP2+SP"]))[0]
    assert LOGPROBS not in failed["the rotary key's sum"]
    assert GRADIENTS in failed["the rotary key's sum"]
    assert LOGPROBS in failed["the bias on the choice"]
