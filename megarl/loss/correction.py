# SPDX-License-Identifier: Apache-2.0
"""Measure and correct the mismatch between the sampler's and the trainer's logprobs.

The same weights give slightly different logprobs in vLLM and in the trainer (kernels, batch shapes, rounding). So the
tokens of even an on-policy step are drawn from a distribution that differs from the trainer's.

Shape letter: T response tokens of a micro-batch. Metrics are this micro-batch's share; see ``LossOutput.metrics``.
"""

import torch

# Upper bound of the log-ratio in ``mismatch_kl``.
LARGEST_LOG_RATIO = 20.0


def importance_weights(old_T: torch.Tensor, sampler_T: torch.Tensor, cap: float) -> torch.Tensor:
    """Return truncated importance sampling weights ``min(exp(old - sampler), cap)``, ``[T]``, without gradient.

    This is token-level TIS of Yao et al., "Your efficient RL framework secretly brings you off-policy RL training"
    (2025); TRL's ``vllm_importance_sampling_mode="token_truncate"``. The cap bounds the variance that rare tokens would
    cause.

    Args:
        old_T: ``[T]`` the trainer's logprobs at the start of the step.
        sampler_T: ``[T]`` the sampler's logprobs when it drew the tokens.
        cap: largest weight.
    """
    # exp may overflow to inf; the cap bounds that too.
    return (old_T - sampler_T).detach().exp().clamp(max=cap)


def correction_metrics(weights_T: torch.Tensor, cap: float, token_fraction: float) -> dict[str, torch.Tensor]:
    """Return ``correction_mean``, the mean weight, and ``correction_capped``, the fraction of capped weights."""
    return {
        "correction_mean": weights_T.double().sum() * token_fraction,
        "correction_capped": (weights_T >= cap).sum().double() * token_fraction,
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
