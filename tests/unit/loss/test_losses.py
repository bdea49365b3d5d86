# SPDX-License-Identifier: Apache-2.0
"""Test GRPO and CISPO: gradients by definition, metrics, refusals."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megarl.config import LossConfig
from megarl.errors import ConfigError, LossInputError
from megarl.loss import LOSSES, TokenBatch, build_loss
from megarl.loss.policy import k3
from tests.unit.loss.cases import CONFIG, make_case

PLAIN = LossConfig(importance_cap=None)


def gradient_of(config: LossConfig, logprobs: torch.Tensor, tokens: TokenBatch) -> torch.Tensor:
    leaf = logprobs.clone().requires_grad_()
    return torch.autograd.grad(build_loss(config)(leaf, tokens).loss, leaf)[0]


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_on_policy_gradient_is_the_plain_policy_gradient(name: str) -> None:
    case = make_case()
    tokens = replace(case.tokens, old_logprobs_T=None)
    gradient = gradient_of(PLAIN.model_copy(update={"name": name}), case.logprobs_T, tokens)
    torch.testing.assert_close(gradient, -tokens.weights_T * tokens.advantages_T)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_missing_old_logprobs_mean_the_current_ones(name: str) -> None:
    case, config = make_case(), CONFIG.model_copy(update={"name": name})
    missing = gradient_of(config, case.logprobs_T, replace(case.tokens, old_logprobs_T=None))
    given = gradient_of(config, case.logprobs_T, replace(case.tokens, old_logprobs_T=case.logprobs_T))
    assert torch.equal(missing, given)


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope"),
    [
        (1.1, 1.0, 1.1),
        (1.15, 1.0, 1.15),
        (1.3, 1.0, 0.0),
        (0.5, 1.0, 0.5),
        (1.3, -1.0, 1.3),
        (0.85, -1.0, 0.0),
        (0.95, -1.0, 0.95),
    ],
)
def test_grpo_cuts_the_gradient_only_where_the_step_would_go_further(
    ratio: float, advantage: float, slope: float
) -> None:
    old = torch.tensor([-1.0], dtype=torch.float64)
    tokens = TokenBatch(torch.ones_like(old), torch.full_like(old, advantage), 1.0, old_logprobs_T=old)
    config = PLAIN.model_copy(update={"clip_low": 0.1, "clip_high": 0.2})
    gradient = gradient_of(config, old + torch.tensor(ratio, dtype=torch.float64).log(), tokens)
    assert gradient.item() == pytest.approx(-slope * advantage)


def test_cispo_bounds_the_weight_and_keeps_the_gradient() -> None:
    old = torch.full((3,), -1.0, dtype=torch.float64)
    ratios = torch.tensor([0.5, 1.1, 1.9], dtype=torch.float64)
    tokens = TokenBatch(torch.ones_like(old), torch.full_like(old, 2.0), 1 / 3, old_logprobs_T=old)
    config = PLAIN.model_copy(update={"name": "cispo", "clip_low": 0.2, "clip_high": 0.4})
    gradient = gradient_of(config, old + ratios.log(), tokens)
    torch.testing.assert_close(gradient, -2.0 * torch.tensor([0.8, 1.1, 1.4], dtype=torch.float64))


def test_kl_penalty_is_zero_at_the_reference_and_pulls_towards_it() -> None:
    case = make_case()
    still = torch.zeros_like(case.logprobs_T)
    config = PLAIN.model_copy(update={"kl_coef": 0.5})
    at = replace(case.tokens, advantages_T=still, reference_logprobs_T=case.logprobs_T)
    assert not gradient_of(config, case.logprobs_T, at).any()
    above = replace(at, reference_logprobs_T=case.logprobs_T + 0.3)
    # d/dx (e^(r - x) - 1 - (r - x)) = 1 - e^(r - x): descending raises the logprob.
    slope = 0.5 * (1.0 - torch.tensor(0.3, dtype=torch.float64).exp())
    torch.testing.assert_close(gradient_of(config, case.logprobs_T, above), slope * above.weights_T)


@pytest.mark.parametrize("size", [1e-7, 1e-5, 1e-3, 0.1, 3.0])
def test_float32_keeps_the_kl_penalty_near_the_reference(size: float) -> None:
    difference = torch.tensor([size, -size], dtype=torch.float32)
    leaf = torch.zeros(2, requires_grad=True)
    value = k3(leaf, difference)
    exact = difference.double()
    torch.testing.assert_close(value.detach().double(), exact.expm1() - exact, rtol=2e-7, atol=1e-45)
    gradient = torch.autograd.grad(value.sum(), leaf)[0].double()
    torch.testing.assert_close(gradient, -exact.expm1(), rtol=1e-7, atol=0.0)


def test_cispo_without_a_lower_bound_weighs_every_small_ratio_as_it_is() -> None:
    old = torch.full((3,), -1.0, dtype=torch.float64)
    ratios = torch.tensor([1e-6, 0.3, 1.9], dtype=torch.float64)
    tokens = TokenBatch(torch.ones_like(old), torch.full_like(old, 2.0), 1 / 3, old_logprobs_T=old)
    config = LossConfig(name="cispo", importance_cap=None, clip_low=1.0, clip_high=0.4)
    gradient = gradient_of(config, old + ratios.log(), tokens)
    torch.testing.assert_close(gradient, -2.0 * torch.tensor([1e-6, 0.3, 1.4], dtype=torch.float64))
    assert build_loss(config)(old + ratios.log(), tokens).metrics["clip_low"] == 0


def test_metrics_count_what_they_name() -> None:
    old = torch.full((4,), -1.0, dtype=torch.float64)
    ratios = torch.tensor([0.5, 2.0, 2.0, 0.5], dtype=torch.float64)
    advantages = torch.tensor([-1.0, 1.0, -1.0, 1.0], dtype=torch.float64)
    # The sampler gave the first token half the probability that the old policy gives it.
    sampler = old - torch.tensor([2.0, 1.0, 1.0, 1.0], dtype=torch.float64).log()
    tokens = TokenBatch(torch.full_like(old, 0.25), advantages, 0.25, sampler, old, old + ratios.log())
    config = LossConfig(importance_cap=1.5, kl_coef=1.0)
    metrics = {name: value.item() for name, value in build_loss(config)(old + ratios.log(), tokens).metrics.items()}
    mismatch = torch.tensor(2.0, dtype=torch.float64).log().item()
    # Per token: -min(r A, clip(r) A) * weight; the first token's weight is capped.
    assert metrics == pytest.approx(
        {
            "loss": (0.8 * 1.5 - 1.2 + 2.0 - 0.5) / 4,
            "clip_low": 0.25,
            "clip_high": 0.25,
            "ratio_mean": 5.0 / 4,
            "ratio_max": 2.0,
            "kl": 0.0,
            "mismatch_mean": mismatch / 4,
            "mismatch_max": mismatch,
            "mismatch_kl": (1.0 - mismatch) / 4,
            "correction_mean": 4.5 / 4,
            "correction_capped": 0.25,
        }
    )


def test_the_mismatch_is_measured_with_the_correction_off() -> None:
    case = make_case()
    metrics = build_loss(PLAIN)(case.logprobs_T, case.tokens).metrics
    assert metrics["mismatch_mean"] > 0 and "correction_mean" not in metrics


def changed(name: str, value: float | None, position: int = 3) -> dict[str, Any]:
    tensor = getattr(make_case().tokens, name).clone()
    tensor[position] = value
    return {name: tensor}


@pytest.mark.parametrize(
    "name", ["weights_T", "advantages_T", "sampler_logprobs_T", "old_logprobs_T", "reference_logprobs_T"]
)
@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_misaligned_and_non_finite_inputs_raise_by_name(loss: str, name: str) -> None:
    case, build = make_case(), build_loss(CONFIG.model_copy(update={"name": loss}))
    tensor = getattr(case.tokens, name)
    for wrong in (tensor[:-1], tensor[:1], tensor[:, None], torch.cat([tensor, tensor[:1]])):
        with pytest.raises(LossInputError, match=rf"{name} has shape .* they must be equal"):
            build(case.logprobs_T, replace(case.tokens, **{name: wrong}))
    for value in (float("nan"), float("inf"), float("-inf")):
        with pytest.raises(LossInputError, match=rf"{name} is {value} at token 3 of {len(tensor)}"):
            build(case.logprobs_T, replace(case.tokens, **changed(name, value)))


def test_non_finite_current_logprobs_raise() -> None:
    case = make_case()
    logprobs = case.logprobs_T.clone()
    logprobs[0] = float("nan")
    with pytest.raises(LossInputError, match="the current logprobs is nan at token 0"):
        build_loss(CONFIG)(logprobs, case.tokens)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_an_overflowing_ratio_raises_and_never_becomes_a_nan_gradient(advantage: float) -> None:
    logprobs, old = torch.tensor([-0.1]), torch.tensor([-100.0])
    tokens = TokenBatch(torch.ones(1), torch.tensor([advantage]), 1.0, old_logprobs_T=old)
    with pytest.raises(LossInputError, match=r"the ratio .* is inf at token 0 of 1"):
        build_loss(PLAIN)(logprobs, tokens)


def test_an_overflowing_kl_raises() -> None:
    logprobs, reference = torch.tensor([-100.0]), torch.tensor([-0.1])
    tokens = TokenBatch(torch.ones(1), torch.ones(1), 1.0, reference_logprobs_T=reference)
    with pytest.raises(LossInputError, match=r"the KL term .* is inf"):
        build_loss(PLAIN.model_copy(update={"kl_coef": 0.1}))(logprobs, tokens)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("reference_logprobs_T", "reference_logprobs_T is missing, but loss.kl_coef is 0.1"),
        ("sampler_logprobs_T", "sampler_logprobs_T is missing, but loss.importance_cap is 1.2"),
    ],
)
def test_what_the_settings_need_must_be_there(name: str, message: str) -> None:
    case = make_case()
    without: dict[str, Any] = {name: None}
    with pytest.raises(LossInputError, match=message):
        build_loss(CONFIG)(case.logprobs_T, replace(case.tokens, **without))


def test_an_unknown_loss_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown loss 'gripo'; did you mean 'grpo'\? \(known: cispo, grpo, gspo\)"):
        build_loss(LossConfig(name="gripo"))
