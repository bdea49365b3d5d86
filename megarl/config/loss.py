"""The policy-gradient loss and what surrounds it."""

from typing import Literal

from pydantic import Field

from megarl.config.base import Section


class LossConfig(Section):
    name: str = "grpo"
    """A registered loss."""
    clip_low: float = Field(0.2, ge=0.0, le=1.0)
    """The ratio is clipped below at ``1 - clip_low``; 1 leaves it without a lower bound (CISPO's paper)."""
    clip_high: float = Field(0.2, ge=0.0)
    """The ratio is clipped above at ``1 + clip_high``."""
    kl_coef: float = Field(0.0, ge=0.0)
    """Weight of the k3 KL estimate against the adapter-off reference; 0 skips the reference pass."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """``token_mean``: every response token of the step weighs the same (DAPO). ``sequence_mean``: every sequence does
    (GRPO). ``constant``: token sums over sequences times ``sampler.max_response_tokens`` (Dr. GRPO)."""
    advantage_scale: Literal["std", "none"] = "std"
    """``std``: group advantages are divided by the group's standard deviation (GRPO); ``none``: centred only."""
    importance_cap: float | None = Field(2.0, gt=0.0)
    """Truncated importance sampling: each token is weighted by min(old / sampler probability, cap), which corrects
    the sampler-trainer mismatch. ``null`` switches the correction off; the mismatch is measured all the same."""
