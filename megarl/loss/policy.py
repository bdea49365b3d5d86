# SPDX-License-Identifier: Apache-2.0
"""Compute the parts that all policy losses share: checks, ratio to the old policy, KL penalty, correction, metrics.

A loss computes ``policy_T`` from a ``Policy`` and passes it to ``finish``; see ``grpo.py``.
"""

from dataclasses import dataclass

import torch

from megarl.config import LossConfig
from megarl.errors import LossInputError
from megarl.loss.base import LossOutput, TokenBatch
from megarl.loss.correction import correction_metrics, importance_ratios, importance_weights, largest, mismatch_metrics
from megarl.loss.late_checks import require


@dataclass(frozen=True)
class Policy:
    """The checked inputs of one micro-batch, and the ratio.

    Attributes:
        logprobs_T: logprobs of the current policy, with gradient.
        old_T: logprobs of the old policy, without gradient. If the batch has none, the current ones, detached.
        ratio_T: exp(logprobs - old), with gradient; finite.
        tokens: the batch.
        config: the loss's settings.
    """

    logprobs_T: torch.Tensor
    old_T: torch.Tensor
    ratio_T: torch.Tensor
    tokens: TokenBatch
    config: LossConfig

    def finish(self, policy_T: torch.Tensor, metrics: dict[str, torch.Tensor]) -> LossOutput:
        """Add correction and KL penalty to a per-token policy loss; return its weighted sum.

        The correction scales only the policy term. The KL penalty is not an expectation over the sampler's
        distribution, so it needs none (TRL does the same).

        Args:
            policy_T: ``[T]`` per-token policy loss.
            metrics: metrics of this loss, to add to those of all losses.
        """
        tokens, config, fraction = self.tokens, self.config, self.tokens.token_fraction
        detached_T = self.ratio_T.detach().double()
        metrics = {**metrics, "ratio_mean": detached_T.sum() * fraction, "ratio_max": largest(detached_T)}
        if tokens.sampler_logprobs_T is not None:
            metrics |= mismatch_metrics(self.old_T, tokens.sampler_logprobs_T, fraction)
            if config.importance_cap is not None:
                ratios_T = importance_ratios(self.old_T, tokens, config.importance_level)
                weights_T = importance_weights(ratios_T, config.importance_cap, config.importance_mode)
                metrics |= correction_metrics(weights_T, ratios_T, config.importance_cap, fraction)
                policy_T = policy_T * weights_T
        if tokens.reference_logprobs_T is not None and config.kl_coef > 0.0:
            kl_T = k3(self.logprobs_T, tokens.reference_logprobs_T)
            metrics["kl"] = kl_T.detach().double().sum() * fraction
            policy_T = policy_T + config.kl_coef * kl_T
        loss = (tokens.weights_T * policy_T).sum()
        return LossOutput(loss, {"loss": loss.detach(), **metrics})

    def fraction_of(self, chosen_T: torch.Tensor) -> torch.Tensor:
        """Return this micro-batch's share of the fraction of the step's tokens where ``chosen_T`` is True."""
        return chosen_T.sum().double() * self.tokens.token_fraction


def prepare(logprobs_T: torch.Tensor, tokens: TokenBatch, config: LossConfig) -> Policy:
    """Check a micro-batch and compute the ratio to the old policy.

    Nothing is clamped or replaced. ``exp(logprob - old)`` overflows float32 only if the old policy gave a token less
    than e^-88, which no sampler draws. So an overflow means that the old logprobs belong to other tokens or weights.
    With clamping, training would go on with them; ``min(ratio * A, clipped * A)`` would hide the overflow in the loss
    and give a gradient of 0 * inf. Large finite ratios are kept and shown as ``ratio_max``.

    Raises:
        LossInputError: shapes differ, a value is not finite, the ratio or the KL overflows, reference logprobs are
            missing though ``loss.kl_coef`` is positive, or sampler logprobs are missing though ``loss.importance_cap``
            is set.
    """
    tokens.check(logprobs_T)
    if config.kl_coef > 0.0 and tokens.reference_logprobs_T is None:
        raise LossInputError(
            f"reference_logprobs_T is missing, but loss.kl_coef is {config.kl_coef}; "
            "compute them with the adapter disabled, or set loss.kl_coef=0"
        )
    if config.importance_cap is not None and tokens.sampler_logprobs_T is None:
        raise LossInputError(
            f"sampler_logprobs_T is missing, but loss.importance_cap is {config.importance_cap}; "
            "pass the sampler's logprobs, or set loss.importance_cap=null"
        )
    old_T = (logprobs_T if tokens.old_logprobs_T is None else tokens.old_logprobs_T).detach()
    ratio_T = (logprobs_T - old_T).exp()
    used = {
        "the current logprobs": logprobs_T,
        "weights_T": tokens.weights_T,
        "advantages_T": tokens.advantages_T,
        "sampler_logprobs_T": tokens.sampler_logprobs_T,
        "old_logprobs_T": tokens.old_logprobs_T,
        "reference_logprobs_T": tokens.reference_logprobs_T,
        "the ratio exp(logprob - old_logprob)": ratio_T,
    }
    if config.kl_coef > 0.0 and tokens.reference_logprobs_T is not None:
        used["the KL term exp(reference - logprob)"] = (tokens.reference_logprobs_T - logprobs_T.detach()).exp()
    _require_finite({name: value for name, value in used.items() if value is not None})
    return Policy(logprobs_T, old_T, ratio_T, tokens, config)


def k3(logprobs_T: torch.Tensor, reference_T: torch.Tensor) -> torch.Tensor:
    """Return the ``[T]`` k3 estimate of KL(policy || reference), with gradient: e^d - 1 - d, d = reference - logprob.

    Schulman, "Approximating KL divergence" (2020); GRPO's penalty (DeepSeekMath arXiv:2402.03300, equation 4).
    """
    # Compute value and slope in float64. In float32, e^d - 1 - d cancels (at d = 1e-3, to 1e-4 of itself). Autograd's
    # derivative of expm1 is e^d, which rounds d away before 1 is subtracted.
    difference_T = reference_T.detach().double() - logprobs_T.detach().double()
    growth_T = difference_T.expm1()
    value_T, slope_T = (growth_T - difference_T).to(logprobs_T.dtype), -growth_T.to(logprobs_T.dtype)
    return value_T + slope_T * (logprobs_T - logprobs_T.detach())


def _require_finite(values: dict[str, torch.Tensor]) -> None:
    values = {name: value.detach() for name, value in values.items()}

    def explain(finite: list[bool]) -> None:
        name, value = next(item for item, good in zip(values.items(), finite, strict=True) if not good)
        position = int((~value.isfinite()).nonzero()[0])
        raise LossInputError(
            f"{name} is {float(value[position])} at token {position} of {len(value)} of a micro-batch; it must be "
            "finite (logprobs of other tokens or weights, or a model that diverged)"
        )

    # One transfer from the device for all values.
    require(torch.stack([value.isfinite().all() for value in values.values()]), explain)
