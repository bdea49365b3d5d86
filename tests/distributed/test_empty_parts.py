# SPDX-License-Identifier: Apache-2.0
"""A rank without response tokens in a micro-batch takes part in the gradient of every adapted layer all the same."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.loss import build_loss
from megarl.types import Sample
from megarl.verify.inputs.samples import make_samples
from megarl.verify.reference.surrogate_loss import SurrogateLoss
from tests.helpers.models import SHAPE, make_model
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_run import build

OVERLAP = {"train": {"overlap_grad_reduce": True}}
LENGTH, RESPONSE = 30, 5


def norms_of(folder: Path, layout: dict[str, Any], counts: tuple[int, ...], targets: list[str]) -> list[float]:
    """Return the gradient norms of updates with so many samples; of one sample, one data-parallel rank gets none."""
    from megarl.parallel.groups import leave_layout

    leave_layout()
    model = build(folder, layout, target_modules=targets)
    found = []
    for seed, count in enumerate(counts):
        batch = model.pack(make_samples(count, SHAPE["vocab_size"], seed=seed), np.full(count, 0.05))
        model.forward_backward(batch, SurrogateLoss())
        found.append(model.optim_step(1e-3)["grad_norm"])
    return found


def norm_over_context(folder: Path, layout: dict[str, Any], targets: list[str]) -> list[float]:
    """Return the norm of GSPO's gradient, of responses so short that one context-parallel rank holds none of them."""
    from megarl.parallel.groups import leave_layout

    leave_layout()
    model = build(folder, layout, target_modules=targets)
    draw, mask = np.random.default_rng(0), np.arange(LENGTH) >= LENGTH - RESPONSE
    samples = [Sample(draw.integers(0, SHAPE["vocab_size"], LENGTH), mask, advantage=1.0) for _ in range(2)]
    batch = model.pack(samples, np.full(2, 0.05))
    logprobs = model.forward(batch)
    batch = batch.with_logprobs("old_logprobs", logprobs)
    model.forward_backward(batch, build_loss({"name": "gspo", "importance_cap": None}))
    return [model.optim_step(1e-3)["grad_norm"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("empty")
    make_model(path / "model", "qwen3", tied=False)
    return path


@pytest.mark.parametrize("targets", [["lm_head"], ["q_proj", "lm_head"]], ids="+".join)
def test_a_data_parallel_rank_without_samples(folder: Path, targets: list[str]) -> None:
    counts = (4, 1, 1)
    alone = run_ranks(norms_of, 1, folder, {}, counts, targets)[0]
    for layout in ({"data": 2}, {"data": 2} | OVERLAP):
        for found in run_ranks(norms_of, 2, folder, layout, counts, targets):
            assert found == pytest.approx(alone, rel=1e-4), layout


@pytest.mark.parametrize("layout", [{"context": 2}, {"context": 2} | OVERLAP], ids=["CP2", "CP2+overlap"])
def test_a_context_parallel_rank_without_response_tokens(folder: Path, layout: dict[str, Any]) -> None:
    for targets in (["lm_head"], ["q_proj", "lm_head"]):
        alone = run_ranks(norm_over_context, 1, folder, {}, targets)[0]
        for found in run_ranks(norm_over_context, 2, folder, layout, targets):
            assert found == pytest.approx(alone, rel=1e-4)
