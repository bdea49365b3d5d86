# SPDX-License-Identifier: Apache-2.0
"""Linears whose tokens travel beside the products compute what whole ones do, in any order of the ranks' tokens."""

from pathlib import Path
from typing import Any

import pytest

from megarl.verify.compare import relative_error
from tests.helpers.models import make_model
from tests.helpers.overlapped import compute_linears, exchange_rank_by_rank
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_run import build
from tests.helpers.updates import updates

# Of the linears in float64, of models in float32 with an epsilon that keeps AdamW from making a learning rate out of
# the rounding of a gradient near zero.
BOUND, MODEL_BOUND, LR, EPSILON = 1e-12, 1e-5, 1e-3, 1e-3
# Name -> family, layout, whether linears are taken apart.
MODELS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "biases, KV copies": ("qwen2", {"tensor": 4}, True),
    "pipeline": ("qwen3", {"tensor": 2, "pipeline": 2}, True),
    "shared experts": ("qwen2_moe", {"tensor": 2, "expert": 2, "data": 2}, True),
    "latent attention": ("deepseek_v3", {"tensor": 2, "data": 2}, True),
    "recomputed": ("llama", {"tensor": 4, "train": {"recompute": "full"}}, True),
    "without sequence parallelism": ("qwen3", {"tensor": 4, "sequence": False}, False),
}


@pytest.mark.parametrize("by_rank", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_linears_are_those_of_whole_matrices(world, by_rank):
    for exchange, found in run_ranks(compute_linears, world, world, by_rank):
        assert exchange == ("RankByRank" if by_rank else "Whole")
        assert max(found.values()) < BOUND, found


def compare_models(folder: str) -> dict[str, tuple[float, int]]:
    """On each rank, for each model: the largest difference from linears that are not taken apart, and how many were."""
    from megarl.lora.layers import parallel_linear
    from megarl.parallel.groups import leave_layout

    exchange_rank_by_rank()
    decide, apart = parallel_linear.can_overlap, [0]

    def counted(base: Any) -> bool:
        apart[0] += decide(base)
        return decide(base)

    found = {}
    for name, (family, layout, _) in MODELS.items():
        results = []
        for choice in (counted, lambda base: False):
            parallel_linear.can_overlap = choice
            leave_layout()
            settings = layout | {"train": {"adam_eps": EPSILON, **layout.get("train", {})}}
            model = build(Path(folder), settings, "float32", family)
            results.append(list(updates(model, (6, 9), LR)))
        pairs = zip(*results, strict=True)
        found[name] = max(relative_error(mine[key], theirs[key]) for mine, theirs in pairs for key in mine), apart[0]
        apart[0] = 0
    return found


def test_models_train_as_with_whole_linears(tmp_path):
    for family in {family for family, _, _ in MODELS.values()}:
        make_model(tmp_path / family, family, tied=False, num_hidden_layers=2)
    for found in run_ranks(compare_models, 4, str(tmp_path)):
        for name, (error, apart) in found.items():
            assert error < MODEL_BOUND, (name, error)
            assert bool(apart) is MODELS[name][2], (name, apart)
