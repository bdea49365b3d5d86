# SPDX-License-Identifier: Apache-2.0
"""Experts that are computed together compute what each one does alone: logprobs, gradients and updates.

So they do on aliases of their parameters, on which CUDA graphs are captured.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.verify.compare import relative_error
from tests.helpers.aliased import aliased
from tests.helpers.models import make_model
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_run import build
from tests.helpers.updates import updates

# In float32, with an epsilon that keeps AdamW from making a learning rate out of the rounding of a gradient near zero.
BOUND, LR, EPSILON = 1e-5, 1e-3, 1e-3
TRAINED = {"r": 8, "lora_alpha": 16}
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# Name -> family, layout with the changes of ``train``, changes of the adapter, whether experts are computed together,
# and whether their adapters' matrices then lie together.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], bool, bool]] = {
    "EP": ("qwen3_moe", {"data": 2, "expert": 2}, TRAINED, True, True),
    "shared experts, some parts": ("qwen2_moe", {}, TRAINED | {"target_modules": ["up_proj", "q_proj"]}, True, False),
    "recomputed": ("mixtral", {"train": {"recompute": "full"}}, TRAINED, True, True),
    "distributed": ("mixtral", {"data": 2, "train": {"distributed_optimizer": True}}, TRAINED, True, False),
    "overlapped": ("mixtral", {"data": 2, "train": {"overlap_grad_reduce": True}}, TRAINED, True, False),
    "shared A": ("qwen3_moe", {}, TRAINED | {"target_modules": ["q_proj"], "target_parameters": STACKS}, True, True),
    "no whole vectors": ("qwen3_moe", {}, TRAINED | {"r": 2}, False, False),
    "all": ("qwen3_moe", {}, TRAINED, True, True),
    "ETP": ("qwen3_moe", {"tensor": 2, "expert_tensor": 2}, TRAINED, False, False),
}
# Those that are run on aliases too; CUDA graphs are refused for the others.
ALIASED = ["shared experts, some parts", "shared A", "no whole vectors", "all"]


def train(folder: Path, case: str) -> list[dict[str, torch.Tensor]]:
    """Return what each update computed."""
    from megarl.parallel.groups import leave_layout

    leave_layout()
    family, layout, lora, *_ = CASES[case]
    settings = layout | {"train": {"adam_eps": EPSILON, **layout.get("train", {})}}
    model = build(folder, settings, "float32", family, **lora)
    return list(updates(model, (6, 9), LR))


def compare(folder: str, cases: list[str]) -> dict[str, tuple[float, bool, int, int]]:
    """On each rank, for each case: the largest error, whether all moved, how many training passes went together, and
    how often their matrices lay together.
    """
    from megarl.model.layers.experts import packed, stacks

    found, together, original = {}, [0], packed.weighted_swiglu
    placed, stack_of = [0], stacks.stack_of

    def found_stack(*given: Any) -> Any:
        stack = stack_of(*given)
        placed[0] += stack is not None
        return stack

    stacks.stack_of = found_stack

    def counted(*given: torch.Tensor) -> torch.Tensor:
        together[0] += torch.is_grad_enabled()  # without adapter any experts go together
        return original(*given)

    packed.weighted_swiglu = counted
    for case in cases:
        alone = train(Path(folder), case)
        assert not together[0]
        packed.wants_groups, decides = (lambda tokens, inner: len(tokens) > 0), packed.wants_groups
        results, wanted = train(Path(folder), case), alone
        if case in ALIASED:
            with aliased():
                results, wanted = results + train(Path(folder), case), wanted + alone
        packed.wants_groups = decides
        errors = [
            relative_error(mine[n], theirs[n]) for mine, theirs in zip(results, wanted, strict=True) for n in mine
        ]
        moved = all(tensor.abs().max() > 0 for tensor in alone[-1].values())
        found[case] = max(errors), moved, together[0], placed[0]
        together[0] = placed[0] = 0
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_experts_together_compute_what_each_does_alone(tmp_path, world):
    for family in ("qwen3_moe", "qwen2_moe", "mixtral"):
        make_model(tmp_path / family, family, tied=False, num_hidden_layers=2)
    sizes = {name: max([1, *(size for axis, size in CASES[name][1].items() if axis != "train")]) for name in CASES}
    cases = [name for name in CASES if sizes[name] == world]
    for result in run_ranks(compare, world, str(tmp_path), cases):
        assert list(result) == cases
        for case, (error, moved, together, placed) in result.items():
            assert error < BOUND and moved, (case, error)
            assert (bool(together), bool(placed)) == CASES[case][3:], case
