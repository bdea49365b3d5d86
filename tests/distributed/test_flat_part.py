# SPDX-License-Identifier: Apache-2.0
"""An optimizer whose tensors lie in a few runs makes the updates of mcore's, which holds each tensor by itself."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.verify.compare import relative_error
from tests.helpers.models import make_model
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_run import build
from tests.helpers.updates import updates

# The only difference is the order in which squares are added up for the norm, by which gradients are clipped.
BOUND, LR = 1e-5, 1e-3
# Name -> dtype, layout with the changes of ``train``, whether the tensors can lie in runs.
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "float32": ("float32", {"tensor": 2, "expert_tensor": 2}, True),
    "bfloat16": ("bfloat16", {"data": 2, "expert": 2}, True),
    "overlapped": ("bfloat16", {"data": 2, "train": {"overlap_grad_reduce": True}}, True),
    "distributed": ("bfloat16", {"data": 2, "train": {"distributed_optimizer": True}}, False),
}


def train(folder: Path, case: str) -> list[dict[str, torch.Tensor]]:
    """Return what each update computed, and the moments and main weights after the last."""
    from megarl.parallel.groups import leave_layout

    leave_layout()
    dtype, layout, _ = CASES[case]
    layout = layout | {"train": {"max_grad_norm": 0.05, "adam_eps": 1e-3, **layout.get("train", {})}}
    model = build(folder, layout, dtype, r=8, lora_alpha=16, lora_dropout=0.0)
    results = list(updates(model, (6, 9, 4), LR))
    state = {f"main {name}": tensor.clone() for name, tensor in model.optimizer.main_weights().items()}
    for kind, tensors in model.optimizer.moments().items():
        state |= {f"{kind} {name}": tensor.clone() for name, tensor in tensors.items()}
    return [*results, state]


def compare(folder: str) -> dict[str, tuple[float, bool]]:
    """On each rank, for each case: the largest error, and whether some part was flat."""
    from megarl.model.optimizer import adapter_optimizer

    found, flat, original = {}, [False], adapter_optimizer.flat_part

    def noted(*given: Any) -> Any:
        part = original(*given)
        flat[0] |= part is not None
        return part

    for case in CASES:
        flat[0] = False
        adapter_optimizer.flat_part = noted
        results = train(Path(folder), case)
        adapter_optimizer.flat_part = lambda *given: None
        alone = train(Path(folder), case)
        pairs = zip(results, alone, strict=True)
        found[case] = max(relative_error(mine[n], theirs[n]) for mine, theirs in pairs for n in mine), flat[0]
    return found


def test_updates_of_runs_are_those_of_single_tensors(tmp_path):
    make_model(tmp_path / "model", "qwen3_moe", tied=False, num_hidden_layers=2)
    for errors in run_ranks(compare, 2, str(tmp_path)):
        assert list(errors) == list(CASES)
        for case, (error, flat) in errors.items():
            assert error < BOUND and flat == CASES[case][2], (case, error, flat)


def placed(folder: str) -> list[tuple[int, bool]]:
    """Return for each layer that adapts several parts: the number of matrices A, and whether they lie together."""
    from megarl.parallel.stacks import joined

    model = build(Path(folder), {"tensor": 2}, "float32", r=8, lora_alpha=16, lora_dropout=0.0)
    found = []
    for module in model.chunks[0].modules():
        read = module.read_together() if hasattr(module, "read_together") else []
        if len(read) > 1:
            found.append((len(read), joined(read).data_ptr() == read[0].data_ptr()))
    return found


def test_matrices_that_one_product_reads_lie_together(tmp_path):
    make_model(tmp_path / "model", "qwen3", tied=False, num_hidden_layers=2)
    for found in run_ranks(placed, 2, str(tmp_path)):
        assert found == [(3, True), (2, True)] * 2


@pytest.mark.parametrize(("sizes", "expected"), [((8, 16), True), ((8, 12), False), ((12, 16), False)])
def test_matrices_that_would_lose_their_alignment_stay(sizes, expected):
    from megarl.model.optimizer.flat_part import aligned

    tensors = [torch.zeros(size, dtype=torch.bfloat16) for size in sizes]
    assert aligned([(tensor, tensor) for tensor in tensors]) is expected
