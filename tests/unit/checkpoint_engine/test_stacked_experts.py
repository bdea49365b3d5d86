# SPDX-License-Identifier: Apache-2.0
"""Convert stacked adapters to vLLM's pairs: each expert's product is that of PEFT's own formula."""

import pytest
import torch

pytest.importorskip("vllm.lora.layers")

from peft import LoraConfig

from megarl.checkpoint_engine.receiver.adapters import adapter_plan
from megarl.checkpoint_engine.receiver.experts import stacked_experts
from megarl.errors import WeightSyncError
from tests.unit.checkpoint_engine.test_mixtures import (
    EXPERTS,
    HIDDEN,
    INNER,
    NAME,
    PARTS,
    experts,
    manager,
)

RANK = 3


def stacked(inputs: int, outputs: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A and B of all experts, as PEFT's ``ParamWrapper`` holds them."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(EXPERTS * RANK, inputs, generator=generator)
    return a, torch.randn(outputs, RANK * EXPERTS, generator=generator)


def deltas(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute ``ParamWrapper.get_delta_weight`` of PEFT 0.21 without its scaling: ``[experts, out, in]``."""
    return torch.einsum("o r e, e r i -> e o i", b.view(len(b), -1, EXPERTS), a.view(EXPERTS, -1, a.shape[1]))


def unstack(halves: dict, **settings: object) -> stacked_experts.Unstacked:
    around = manager(experts())
    shapes = adapter_plan.linear_shapes(around)
    return stacked_experts.unstack(around._adapter_manager, halves, shapes, LoraConfig(target_modules=[], **settings))


def test_each_projection_of_each_expert_gets_its_part():
    gate_up, down = stacked(HIDDEN, 2 * INNER, 0), stacked(INNER, HIDDEN, 1)
    unstacked = unstack(
        {f"{NAME}.base_layer": gate_up, NAME: down}, target_parameters=["gate_up_proj", "mlp.experts.down_proj"]
    )
    assert unstacked.halves.keys() == set(PARTS) and not unstacked.absent
    assert unstacked.keys[f"{NAME}.1.up_proj"] == f"{NAME}.gate_up_proj"
    for expert in range(EXPERTS):
        products = {
            leaf: b @ a
            for leaf in ("gate", "up", "down")
            for a, b in [unstacked.halves[f"{NAME}.{expert}.{leaf}_proj"]]
        }
        torch.testing.assert_close(torch.cat([products["gate"], products["up"]]), deltas(*gate_up)[expert])
        torch.testing.assert_close(products["down"], deltas(*down)[expert])


def test_one_parameter_alone_is_the_outer_wrapper_and_the_other_is_absent():
    unstacked = unstack({NAME: stacked(HIDDEN, 2 * INNER, 0)}, target_parameters=["experts.gate_up_proj"])
    assert len(unstacked.halves) == 2 * EXPERTS
    assert unstacked.absent == {f"{NAME}.{expert}.down_proj": (INNER, HIDDEN) for expert in range(EXPERTS)}


@pytest.mark.parametrize(
    ("halves", "part"),
    [
        ({}, f"covers '{NAME}', but no tensor of it came"),
        (
            {NAME: (torch.zeros(EXPERTS * RANK + 1, HIDDEN), torch.zeros(2 * INNER, EXPERTS * RANK))},
            "cannot share",
        ),
        (
            {NAME: (torch.zeros(EXPERTS * RANK, HIDDEN), torch.zeros(2 * INNER + 1, EXPERTS * RANK))},
            "cannot share",
        ),
    ],
    ids=["missing", "wrong A", "wrong B"],
)
def test_a_pair_that_is_missing_or_cannot_be_shared_is_refused(halves, part):
    with pytest.raises(WeightSyncError) as failure:
        unstack(halves, target_parameters=["gate_up_proj"])
    assert part in str(failure.value)
