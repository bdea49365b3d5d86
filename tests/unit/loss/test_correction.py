# SPDX-License-Identifier: Apache-2.0
"""Test the sampler-trainer mismatch: its measure against exact KL, its correction against an exact expectation."""

from dataclasses import replace

import pytest
import torch

from megarl.config import LossConfig
from megarl.loss import TokenBatch, build_loss
from megarl.loss.correction import correction_metrics, importance_ratios, importance_weights, mismatch_metrics
from tests.unit.loss.cases import LENGTHS, make_case


def make_policies(spread: float = 1.2) -> tuple[torch.distributions.Categorical, torch.distributions.Categorical]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(11, generator=generator, dtype=torch.float64)
    moved = logits + spread * torch.randn(11, generator=generator, dtype=torch.float64)
    return torch.distributions.Categorical(logits=logits), torch.distributions.Categorical(logits=moved)


def test_k3_is_the_kl_of_sampler_and_trainer_in_expectation() -> None:
    sampler, trainer = make_policies()
    expectation = sum(
        float(mismatch_metrics(trainer.logits[i : i + 1], sampler.logits[i : i + 1], 1.0)["mismatch_kl"] * p)
        for i, p in enumerate(sampler.probs)
    )
    exact = float(torch.distributions.kl_divergence(sampler, trainer))
    reverse = float(torch.distributions.kl_divergence(trainer, sampler))
    assert expectation == pytest.approx(exact, rel=1e-10)
    assert abs(exact - reverse) > 1e-3  # otherwise the direction would not be tested


def test_uncapped_weights_turn_sampler_expectations_into_trainer_expectations() -> None:
    sampler, trainer = make_policies()
    values = torch.linspace(-2.0, 3.0, 11, dtype=torch.float64)
    weights = importance_weights((trainer.logits - sampler.logits).exp(), cap=1e9, mode="truncate")
    torch.testing.assert_close((sampler.probs * weights * values).sum(), (trainer.probs * values).sum())


def test_weights_are_capped_even_where_exp_overflows_and_carry_no_gradient() -> None:
    old = torch.tensor([-1.0, -1.0, -1.0, -200.0], requires_grad=True)
    sampler = torch.tensor([-1.0, -3.0, -200.0, -1.0])
    tokens = TokenBatch(torch.ones(4), torch.ones(4), 1 / 4, sampler_logprobs_T=sampler)
    ratios = importance_ratios(old, tokens, "token")
    weights = importance_weights(ratios, 2.0, "truncate")
    torch.testing.assert_close(weights, torch.tensor([1.0, 2.0, 2.0, 0.0]))
    assert not weights.requires_grad
    metrics = correction_metrics(weights, ratios, 2.0, 1 / 4)
    assert metrics["correction_mean"].item() == 1.25
    assert metrics["correction_capped"].item() == 0.5
    torch.testing.assert_close(importance_weights(ratios, 2.0, "mask"), torch.tensor([1.0, 0.0, 0.0, 0.0]))


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_correction_scales_the_gradient_by_its_formula(level: str, mode: str) -> None:
    case = make_case()
    tokens = replace(case.tokens, old_logprobs_T=None)
    assert tokens.sampler_logprobs_T is not None
    config = LossConfig(importance_cap=1.2, importance_level=level, importance_mode=mode)  # type: ignore[arg-type]
    leaf = case.logprobs_T.clone().requires_grad_()
    [found] = torch.autograd.grad(build_loss(config)(leaf, tokens).loss, leaf)
    parts = []
    for difference in (case.logprobs_T - tokens.sampler_logprobs_T).split(LENGTHS):
        ratio = difference.exp() if level == "token" else difference.sum().exp().expand(len(difference))
        parts.append(ratio.clamp(max=1.2) if mode == "truncate" else ratio * (ratio <= 1.2))
    weights = torch.cat(parts)
    assert (weights == 0).any() or mode == "truncate"
    torch.testing.assert_close(found, -tokens.weights_T * tokens.advantages_T * weights)


def test_mismatch_is_the_mean_and_largest_absolute_difference() -> None:
    trainer, sampler = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, -1.75, -3.0])
    metrics = mismatch_metrics(trainer, sampler, 1 / 3)
    assert metrics["mismatch_mean"].item() == pytest.approx(0.25)
    assert metrics["mismatch_max"].item() == 0.5


def test_a_tiny_mismatch_is_not_rounded_away() -> None:
    sampler = torch.full((4,), -2.0)
    trainer = sampler + 2.0**-20
    assert mismatch_metrics(trainer, sampler, 1 / 4)["mismatch_kl"].item() == pytest.approx(2.0**-41, rel=1e-3)


def test_a_huge_mismatch_stays_finite() -> None:
    for sampler in (-150.0, -800.0, -3e38):
        metrics = mismatch_metrics(torch.tensor([-0.5]), torch.tensor([sampler]), 1.0)
        assert all(value.isfinite() for value in metrics.values())
        assert metrics["mismatch_max"] == pytest.approx(-0.5 - sampler)
    assert mismatch_metrics(torch.tensor([-800.0]), torch.tensor([-0.5]), 1.0)["mismatch_kl"].item() == 798.5


def test_the_kl_of_a_mismatch_that_a_run_can_have_is_not_cut() -> None:
    difference = torch.tensor([-19.0, 0.5, 11.0, 19.0], dtype=torch.float64)
    found = mismatch_metrics(difference - 20.0, torch.full_like(difference, -20.0), 0.25)["mismatch_kl"]
    torch.testing.assert_close(found, (difference.exp() - 1 - difference).mean())


def test_no_tokens_leave_the_step_as_it_is() -> None:
    empty = torch.zeros(0)
    assert all(value.item() == 0.0 for value in mismatch_metrics(empty, empty, 0.1).values())
