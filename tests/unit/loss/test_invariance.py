# SPDX-License-Identifier: Apache-2.0
"""Loss, gradient and metrics of a step do not depend on micro-batches, order or data-parallel ranks (promise 5)."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.loss import LOSSES, sequence_weights
from tests.unit.loss.cases import CONFIG, LENGTHS, MAX_RESPONSE, make_case, run, select

AGGREGATIONS = ("token_mean", "sequence_mean", "constant")
WHOLE = [list(range(len(LENGTHS)))]
# Error of summing some 40 float64 terms in another order.
BOUND = 1e-12


@st.composite
def cuts(draw: Any) -> list[list[int]]:
    """Draw any order of the sequences, cut into micro-batches anywhere; some may be empty. Ranks are further cuts."""
    order = draw(st.permutations(range(len(LENGTHS))))
    bounds = sorted(draw(st.lists(st.integers(0, len(order)), max_size=5)))
    return [list(order[a:b]) for a, b in zip([0, *bounds], [*bounds, len(order)], strict=True)]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", sorted(LOSSES))
@settings(max_examples=30)
@given(parts=cuts())
def test_any_cut_gives_the_same_loss_gradient_and_metrics(name: str, aggregation: str, parts: list[list[int]]) -> None:
    loss, case = LOSSES[name](CONFIG), make_case(aggregation)
    total, gradient, metrics = run(loss, case, WHOLE)
    cut_total, cut_gradient, cut_metrics = run(loss, case, parts)
    assert cut_total == pytest.approx(total, abs=BOUND)
    torch.testing.assert_close(cut_gradient, gradient, rtol=0.0, atol=BOUND)
    assert cut_metrics == pytest.approx(metrics, abs=BOUND)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_invariance_test_would_catch_denominators_per_micro_batch(aggregation: str) -> None:
    loss, case, parts = LOSSES["grpo"](CONFIG), make_case(aggregation), [[0, 1, 2], [3, 4], [5, 6]]
    _, gradient, _ = run(loss, case, WHOLE)
    leaf = case.logprobs_T.clone().requires_grad_()
    for sequences in parts:
        positions = case.positions(sequences)
        tokens = select(case, sequences)
        counts = torch.tensor([LENGTHS[s] for s in sequences])
        local = torch.from_numpy(sequence_weights(counts.numpy(), aggregation, MAX_RESPONSE))  # type: ignore[arg-type]
        # The result of a mean per micro-batch, averaged over micro-batches.
        object.__setattr__(tokens, "weights_T", local.repeat_interleave(counts) / len(parts))
        loss(leaf[positions], tokens).loss.backward()
    assert leaf.grad is not None
    assert (leaf.grad - gradient).abs().max() > 1e-3
