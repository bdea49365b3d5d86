# SPDX-License-Identifier: Apache-2.0
"""Measure and correct the mismatch between the sampler's and the trainer's logprobs.

The same weights give slightly different logprobs in vLLM and in the trainer (kernels, batch shapes, rounding). So the
tokens of even an on-policy step are drawn from a distribution that differs from the trainer's.

Shape letter: T response tokens of a micro-batch. Metrics are this micro-batch's share; see ``LossOutput.metrics``.
"""

from typing import Literal

import torch

from megarl.loss.base import TokenBatch

# Upper bound of the log-ratio in ``mismatch_kl``.
LARGEST_LOG_RATIO = 20.0


def importance_ratios(old_T: torch.Tensor, tokens: TokenBatch, level: Literal["token", "sequence"]) -> torch.Tensor:
    """Return ``exp(old - sampler)``, ``[T]``, without gradient.

    Args:
        old_T: ``[T]`` the trainer's logprobs at the start of the step.
        tokens: the micro-batch, with the sampler's logprobs.
        level: ``"token"``: each token's ratio. ``"sequence"``: the product over its sequence's response tokens, the
            ratio of the sequences' probabilities (TRL's and verl's ``sequence`` level).
    """
    assert tokens.sampler_logprobs_T is not None
    log_ratios_T = (old_T - tokens.sampler_logprobs_T).detach()
    if level == "sequence":
        log_ratios_T = tokens.per_token(tokens.sequence_sum(log_ratios_T))
    return log_ratios_T.exp()


def importance_weights(ratios_T: torch.Tensor, cap: float, mode: Literal["truncate", "mask"]) -> torch.Tensor:
    """Bound importance ratios, ``[T]``.

    - ``"truncate"``: ``min(ratio, cap)``, the truncated importance sampling (TIS) of Yao et al., "Your efficient RL
      framework secretly brings you off-policy RL training" (2025); TRL's ``token_truncate``, ``sequence_truncate``.
    - ``"mask"``: the ratio up to the cap and 0 above it; TRL's ``token_mask`` and ``sequence_mask``. IcePop (Ling
      team, "Small leak can sink a great ship", 2025) masks tokens so, and below a lower bound too. Unlike in verl's
      rollout correction, denominators count the masked tokens: they are fixed before the first ratio is known.

    The cap bounds the variance that rare tokens would cause.

    Args:
        ratios_T: ``[T]`` from ``importance_ratios``. inf, where exp overflowed, is above any cap.
        cap: largest weight.
        mode: one of the above.
    """
    return ratios_T.clamp(max=cap) if mode == "truncate" else torch.where(ratios_T <= cap, ratios_T, 0.0)


def correction_metrics(
    weights_T: torch.Tensor, ratios_T: torch.Tensor, cap: float, token_fraction: float
) -> dict[str, torch.Tensor]:
    """Return ``correction_mean``, the mean weight, and ``correction_capped``, the fraction of ratios above the cap."""
    return {
        "correction_mean": weights_T.double().sum() * token_fraction,
        "correction_capped": (ratios_T > cap).sum().double() * token_fraction,
    }


def mismatch_metrics(
    logprobs_T: torch.Tensor, sampler_logprobs_T: torch.Tensor, token_fraction: float
) -> dict[str, torch.Tensor]:
    """Measure the difference between trainer and sampler, in nats; return detached float64 scalars.

    d is trainer - sampler, for tokens that the sampler drew:

    - ``mismatch_mean``, ``mismatch_max``: mean and largest |d|. The mean is 0 only if both agree.
    - ``mismatch_kl``: mean of e^d - 1 - d, the k3 estimate of KL(sampler || trainer), which is unbiased and never
      negative (Schulman, "Approximating KL divergence", 2020). In e^d, d is bounded by 20, as in verl's ``low_var_kl``;
      otherwise one token that the sampler almost excluded (-800) would make the mean infinite. ``mismatch_max`` has no
      such bound.

    Args:
        logprobs_T: ``[T]`` the trainer's logprobs, at the start of the step.
        sampler_logprobs_T: ``[T]`` the sampler's logprobs.
        token_fraction: 1 / response tokens of the whole step.
    """
    # float64, because float32 would round away the k3 (5e-13) of a mismatch of 1e-6, and would overflow at d = 89.
    difference_T = logprobs_T.detach().double() - sampler_logprobs_T.double()
    distance_T = difference_T.abs()
    return {
        "mismatch_mean": distance_T.sum() * token_fraction,
        "mismatch_max": largest(distance_T),
        "mismatch_kl": (difference_T.clamp(max=LARGEST_LOG_RATIO).expm1() - difference_T).sum() * token_fraction,
    }


def largest(values_T: torch.Tensor) -> torch.Tensor:
    """Return the maximum of non-negative values; 0 for none, so that a maximum over micro-batches is unaffected."""
    return values_T.max() if len(values_T) else values_T.new_zeros(())
