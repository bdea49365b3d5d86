# SPDX-License-Identifier: Apache-2.0
"""Linears whose collectives run beside products compute what whole ones do, however their tokens are divided."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.config import ParallelConfig
from megarl.verify.compare import relative_error
from tests.helpers.models import make_model
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_run import build
from tests.helpers.updates import updates

# In float64 for the linears, in float32 for models, with an epsilon that keeps AdamW from making a learning rate out of
# the rounding of a gradient near zero.
BOUND, MODEL_BOUND, LR, EPSILON = 1e-12, 1e-5, 1e-3, 1e-3
# Tokens of a rank, inputs, outputs and rank of the whole linear; two fused parts with a rank and a scaling each.
TOKENS, INPUTS, OUTPUTS, RANKS, SCALINGS = 7, 12, 16, (2, 3), (0.5, 2.0)
# Name -> family, layout, whether linears are taken apart.
MODELS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "biases, KV copies": ("qwen2", {"tensor": 4}, True),
    "pipeline": ("qwen3", {"tensor": 2, "pipeline": 2}, True),
    "shared experts": ("qwen2_moe", {"tensor": 2, "expert": 2, "data": 2}, True),
    "latent attention": ("deepseek_v3", {"tensor": 2, "data": 2}, True),
    "recomputed": ("llama", {"tensor": 4, "train": {"recompute": "full"}}, True),
    "without sequence parallelism": ("qwen3", {"tensor": 4, "sequence": False}, False),
}


def compute_linears(world: int, parts: int) -> dict[str, float]:
    """On each rank: the errors of both linears' outputs and gradients against products of whole matrices."""
    from megarl.lora.layers import overlapped
    from megarl.lora.layers.products import Layout
    from megarl.model.weights.fusion import HeadLayout
    from megarl.parallel.device import pick_device
    from megarl.parallel.groups import init_groups

    overlapped.LEAST_BYTES, overlapped.MOST_PARTS = 1, parts
    groups = init_groups(ParallelConfig(tensor=world), pick_device("cpu"), seed=0)
    group, rank, ranks = groups.tensor, groups.tensor_rank, world
    layout = Layout((0, 1), RANKS, SCALINGS, "gated", HeadLayout(1, 1, 1))
    draw = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).requires_grad_()

    def slice_of(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor.detach().chunk(ranks, dim)[rank].clone().requires_grad_()

    def halves(tensor: torch.Tensor) -> torch.Tensor:
        """This rank's outputs of both fused parts."""
        return torch.cat([part.chunk(ranks, -1)[rank] for part in tensor.chunk(2, -1)], -1)

    found = {}
    hidden, weight = drawn(TOKENS * ranks, 1, INPUTS), drawn(OUTPUTS, INPUTS).detach()
    matrix_a, slope = drawn(sum(RANKS), INPUTS), drawn(TOKENS * ranks, 1, OUTPUTS).detach()
    matrices = [drawn(OUTPUTS // 2, r) for r in RANKS]
    lows = (hidden @ matrix_a.t()).split(RANKS, -1)
    deltas = [low @ matrix.t() * scaling for low, matrix, scaling in zip(lows, matrices, SCALINGS, strict=True)]
    out = hidden @ weight.t() + torch.cat(deltas, -1)
    out.backward(slope)

    def compare(side: str, result: torch.Tensor, expected: torch.Tensor, summed: list[torch.Tensor]) -> None:
        """Note the errors of an output and of the gradients; ``summed`` are those of this rank's tokens alone."""
        found[f"{side} output"] = relative_error(result.detach(), expected.detach())
        for gradient in summed:
            dist.all_reduce(gradient)

    mine, whole_a = slice_of(hidden, 0), matrix_a.detach().clone().requires_grad_()
    rows = [slice_of(matrix, 0) for matrix in matrices]
    local = halves(weight.t()).t().contiguous()
    result = overlapped.column_linear(mine, local, whole_a, rows, layout, group)
    result.backward(halves(slope))
    compare("column", result, halves(out), [whole_a.grad])
    found["column hidden"] = relative_error(mine.grad, hidden.grad.chunk(ranks)[rank])
    found["column A"] = relative_error(whole_a.grad, matrix_a.grad)
    for number, (row, matrix) in enumerate(zip(rows, matrices, strict=True)):
        found[f"column B {number}"] = relative_error(row.grad, matrix.grad.chunk(ranks)[rank])

    mine, columns = slice_of(hidden, 2), slice_of(matrix_a, 1)
    wholes = [matrix.detach().clone().requires_grad_() for matrix in matrices]
    local = weight.chunk(ranks, 1)[rank].contiguous()
    result = overlapped.row_linear(mine, local, columns, wholes, layout, group)
    result.backward(slope.chunk(ranks)[rank])
    compare("row", result, out.chunk(ranks)[rank], [matrix.grad for matrix in wholes])
    found["row hidden"] = relative_error(mine.grad, hidden.grad.chunk(ranks, 2)[rank])
    found["row A"] = relative_error(columns.grad, matrix_a.grad.chunk(ranks, 1)[rank])
    for number, (whole, matrix) in enumerate(zip(wholes, matrices, strict=True)):
        found[f"row B {number}"] = relative_error(whole.grad, matrix.grad)
    return found


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("world", [2, 4])
def test_linears_are_those_of_whole_matrices(world, parts):
    for found in run_ranks(compute_linears, world, world, parts):
        assert max(found.values()) < BOUND, found


def compare_models(folder: str) -> dict[str, tuple[float, int]]:
    """On each rank, for each model: the largest difference from linears that are not taken apart, and the parts."""
    from megarl.lora.layers import overlapped, parallel_linear
    from megarl.parallel.groups import leave_layout

    overlapped.LEAST_BYTES = 1
    decide, divide, most = parallel_linear.can_overlap, overlapped.parts_of, [0]

    def counted(tokens: int, nbytes: int) -> list[slice]:
        parts = divide(tokens, nbytes)
        most[0] = max(most[0], len(parts))
        return parts

    overlapped.parts_of = counted
    found = {}
    for name, (family, layout, _) in MODELS.items():
        results = []
        for choice in (decide, lambda base: False):
            parallel_linear.can_overlap = choice
            leave_layout()
            settings = layout | {"train": {"adam_eps": EPSILON, **layout.get("train", {})}}
            model = build(Path(folder), settings, "float32", family)
            results.append(list(updates(model, (6, 9), LR)))
            if choice is decide:
                parts, most[0] = most[0], 0
        assert not most[0]
        pairs = zip(*results, strict=True)
        found[name] = max(relative_error(mine[key], theirs[key]) for mine, theirs in pairs for key in mine), parts
    return found


def test_models_train_as_with_whole_linears(tmp_path):
    for family in {family for family, _, _ in MODELS.values()}:
        make_model(tmp_path / family, family, tied=False, num_hidden_layers=2)
    for found in run_ranks(compare_models, 4, str(tmp_path)):
        for name, (error, parts) in found.items():
            assert error < MODEL_BOUND, (name, error)
            assert parts == (4 if MODELS[name][2] else 0), (name, parts)
