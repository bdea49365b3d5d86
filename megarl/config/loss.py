# SPDX-License-Identifier: Apache-2.0
"""The policy-gradient loss and what surrounds it."""

from typing import Any, Literal

from pydantic import Field

from megarl.config.base import Section


class LossConfig(Section):
    name: str = "grpo"
    """A registered loss, or ``file.py:Name``: a class or function that takes this section and returns a
    ``megarl.loss.base.Loss``. The path is relative to the recipe."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of a loss of the user's own."""
    clip_low: float = Field(0.2, ge=0.0, le=1.0)
    """The ratio is clipped below at ``1 - clip_low``; 1 leaves it without a lower bound (CISPO's paper)."""
    clip_high: float = Field(0.2, ge=0.0)
    """The ratio is clipped above at ``1 + clip_high``."""
    kl_coef: float = Field(0.0, ge=0.0)
    """Weight of the k3 KL estimate against the reference; 0 skips the reference pass."""
    reference: Literal["start", "base"] = "start"
    """The policy that ``kl_coef`` holds on to. ``start``: the one that the run started from, which with
    ``lora.init_from`` is a frozen copy of that adapter; ``base``: the model without any adapter. A new adapter starts
    as the base, so the two differ only with ``lora.init_from``."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """``token_mean``: every response token of the step weighs the same (DAPO). ``sequence_mean``: every sequence does
    (GRPO). ``constant``: token sums over sequences times ``sampler.max_response_tokens`` (Dr. GRPO)."""
    advantage_scale: Literal["std", "none"] = "std"
    """``std``: group advantages are divided by the group's standard deviation (GRPO); ``none``: centred only. An update
    whose groups all have equal rewards, and ``kl_coef`` 0, has a gradient of exactly zero: its backward pass is skipped
    (``skipped_backward`` in the metrics). It stays an update: AdamW moves on its moments, weights decay, and the
    learning rate and the policy version count it."""
    importance_cap: float | None = Field(2.0, gt=0.0)
    """Truncated importance sampling: each token is weighted by min(old / sampler probability, cap), which corrects
    the sampler-trainer mismatch. ``null`` switches the correction off; the mismatch is measured all the same."""
