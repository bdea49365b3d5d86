# SPDX-License-Identifier: Apache-2.0
"""The mismatch between the sampler's and the trainer's logprobs: measuring it and correcting for it.

The same weights give slightly different logprobs in vLLM and in the trainer (kernels, batch shapes, rounding), so even
an on-policy step is drawn from another distribution than the one whose gradient is taken.

Shape letter: T response tokens of a micro-batch. Metrics are this micro-batch's share: see ``LossOutput.metrics``.
"""

import torch

# Largest log-ratio whose exponential enters ``mismatch_kl``.
LARGEST_LOG_RATIO = 20.0


def importance_weights(old_T: torch.Tensor, sampler_T: torch.Tensor, cap: float) -> torch.Tensor:
    """Truncated importance sampling weights ``min(exp(old - sampler), cap)``, ``[T]``, without gradient.

    Token-level TIS of Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025);
    TRL's ``vllm_importance_sampling_mode="token_truncate"``. The cap bounds the variance that rare tokens would bring.

    Args:
        old_T: ``[T]`` the trainer's logprobs at the start of the step.
        sampler_T: ``[T]`` the sampler's logprobs when it drew the tokens.
        cap: largest weight.
    """
    # exp may overflow to inf, which the cap then bounds.
    return (old_T - sampler_T).detach().exp().clamp(max=cap)


def correction_metrics(weights_T: torch.Tensor, cap: float, token_fraction: float) -> dict[str, torch.Tensor]:
    """``correction_mean``: mean weight; ``correction_capped``: fraction of tokens whose weight is the cap."""
    return {
        "correction_mean": weights_T.double().sum() * token_fraction,
        "correction_capped": (weights_T >= cap).sum().double() * token_fraction,
    }


def mismatch_metrics(
    logprobs_T: torch.Tensor, sampler_logprobs_T: torch.Tensor, token_fraction: float
) -> dict[str, torch.Tensor]:
    """How far the trainer is from the sampler, in nats, as detached float64 scalars.

    With d = trainer - sampler, over tokens that the sampler drew:

    - ``mismatch_mean``, ``mismatch_max``: mean and largest |d|. The mean is 0 only if both agree.
    - ``mismatch_kl``: mean of e^d - 1 - d, the k3 estimate of KL(sampler || trainer): unbiased and never negative
      (Schulman, "Approximating KL divergence", 2020). In e^d, d is at most 20, as in verl's ``low_var_kl``: one token
      that the sampler all but excluded (-800) would make the mean infinite; ``mismatch_max`` shows it as it is.

    Args:
        logprobs_T: ``[T]`` the trainer's (at the start of the step).
        sampler_logprobs_T: ``[T]`` the sampler's.
        token_fraction: 1 / response tokens of the whole step.
    """
    # float64: in float32 a mismatch of 1e-6 would lose its k3 (5e-13) to rounding, and d = 89 would overflow.
    difference_T = logprobs_T.detach().double() - sampler_logprobs_T.double()
    distance_T = difference_T.abs()
    return {
        "mismatch_mean": distance_T.sum() * token_fraction,
        "mismatch_max": largest(distance_T),
        "mismatch_kl": (difference_T.clamp(max=LARGEST_LOG_RATIO).expm1() - difference_T).sum() * token_fraction,
    }


def largest(values_T: torch.Tensor) -> torch.Tensor:
    """Maximum of values that are never negative; 0 for none, which leaves a maximum over micro-batches as it is."""
    return values_T.max() if len(values_T) else values_T.new_zeros(())
