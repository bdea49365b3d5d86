# SPDX-License-Identifier: Apache-2.0
"""Test the sampler-trainer mismatch: its measure against exact KL, its correction against an exact expectation."""

import pytest
import torch

from megarl.loss.correction import correction_metrics, importance_weights, mismatch_metrics


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
    weights = importance_weights(trainer.logits, sampler.logits, cap=1e9)
    torch.testing.assert_close((sampler.probs * weights * values).sum(), (trainer.probs * values).sum())


def test_weights_are_capped_even_where_exp_overflows_and_carry_no_gradient() -> None:
    old = torch.tensor([-1.0, -1.0, -1.0, -200.0], requires_grad=True)
    sampler = torch.tensor([-1.0, -3.0, -200.0, -1.0])
    weights = importance_weights(old, sampler, cap=2.0)
    torch.testing.assert_close(weights, torch.tensor([1.0, 2.0, 2.0, 0.0]))
    assert not weights.requires_grad
    metrics = correction_metrics(weights, 2.0, 1 / 4)
    assert metrics["correction_mean"].item() == 1.25
    assert metrics["correction_capped"].item() == 0.5


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
