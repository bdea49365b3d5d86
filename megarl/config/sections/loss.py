# SPDX-License-Identifier: Apache-2.0
"""Config section ``loss``: the policy-gradient loss, KL penalty, advantages and mismatch correction."""

from typing import Any, Literal

from pydantic import Field

from megarl.config.base import Section


class LossConfig(Section):
    name: str = "grpo"
    """A registered loss, or ``file.py:Name`` for a class or function that takes this section and returns a
    ``megarl.loss.base.Loss``. The path is relative to the recipe."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of a user-defined loss."""
    clip_low: float = Field(0.2, ge=0.0, le=1.0)
    """The ratio is clipped below at ``1 - clip_low``. With 1 it has no lower bound (as in CISPO's paper)."""
    clip_high: float = Field(0.2, ge=0.0)
    """The ratio is clipped above at ``1 + clip_high``."""
    kl_coef: float = Field(0.0, ge=0.0)
    """Weight of the KL penalty (k3 estimate against the reference); 0 skips the reference pass."""
    reference: Literal["start", "base"] = "start"
    """Reference policy of the KL penalty. ``start``: the policy at the start of the run, which with ``lora.init_from``
    is a frozen copy of that adapter; ``base``: the model without adapter. A new adapter starts as the base model, so
    the two differ only with ``lora.init_from``."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """Weights of the tokens in the loss. ``token_mean``: every response token of the step weighs the same (DAPO).
    ``sequence_mean``: every sequence weighs the same (GRPO). ``constant``: the sum over tokens, divided by the number
    of sequences times ``sampler.max_response_tokens`` (Dr. GRPO)."""
    advantage: str = "group"
    """How rewards become advantages. ``group``: minus the group's mean, scaled (GRPO); ``rloo``: minus the mean of the
    group's other rewards; ``none``: the rewards; or ``file.py:Name`` for a function of the group's rewards ``[G]`` and
    this section that returns one number per completion, or one ``[R]`` array of per-token advantages."""
    advantage_scale: Literal["std", "none"] = "std"
    """Of ``advantage: group``. ``std``: advantages are centred and divided by the group's standard deviation (GRPO);
    ``none``: only centred."""
    groups_without_signal: Literal["keep", "drop", "resample"] = "keep"
    """What happens to prompts whose advantages are all 0. ``keep``: they count in the loss's denominators. ``drop``:
    they leave the batch before training, so they do not. ``resample``: they are dropped, and more prompts are drawn
    until ``train.prompts_per_step`` of them have signal, at most ``train.max_resample_factor`` times as many (DAPO's
    dynamic sampling). ``dropped_groups`` in the metrics counts those that were dropped. In any case, sequences without
    signal skip the backward pass if ``kl_coef`` is 0, because their gradient is exactly zero. If no sequence of an
    update has signal, no backward pass takes place (``skipped_backward`` in the metrics). The update itself still takes
    place: AdamW applies its moments and weight decay, and the learning rate and the policy version advance."""
    truncated: Literal["keep", "zero", "penalise", "mask"] = "keep"
    """Completions that reach ``sampler.max_response_tokens`` (``finish_reason`` ``length``). ``keep``: their reward
    counts as it is. ``zero``: it counts as 0. ``penalise``: every completion within ``overlong_tokens`` of the limit
    loses up to ``overlong_penalty`` (DAPO's soft overlong punishment). Advantages are computed from these scores;
    ``reward`` in the metrics stays the task's own, beside ``trained_reward``. ``mask``: their reward counts in their
    group's advantages, but none of their tokens is trained on or counted by ``token_mean`` (DAPO's overlong
    filtering); ``sequence_mean`` and ``constant`` still count them as sequences."""
    overlong_tokens: int = Field(128, ge=1)
    """With ``truncated: penalise``: the penalty grows linearly over the last so many tokens before the limit (DAPO's
    L_cache)."""
    overlong_penalty: float = Field(1.0, gt=0.0)
    """With ``truncated: penalise``: what a completion that reaches the limit loses."""
    importance_cap: float | None = Field(2.0, gt=0.0)
    """Cap of truncated importance sampling: each token is weighted by min(old / sampler probability, cap), which
    corrects the sampler-trainer mismatch. ``null`` switches the correction off; the mismatch is still measured."""
    importance_level: Literal["token", "sequence"] = "token"
    """The ratio that ``importance_cap`` bounds. ``token``: each token's own; ``sequence``: the product over the
    sequence's response tokens, for all of them."""
    importance_mode: Literal["truncate", "mask"] = "truncate"
    """What happens above ``importance_cap``. ``truncate``: the weight is the cap; ``mask``: the weight is 0, so that
    the token or sequence is left out of the policy term. Denominators still count it."""
