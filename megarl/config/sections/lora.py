# SPDX-License-Identifier: Apache-2.0
"""Config section ``lora``: the adapter, with PEFT's own names."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from megarl.config.base import Section


def _check_pattern(text: str) -> str:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{text!r} is not a regular expression: {error}") from error
    return text


Pattern = Annotated[str, AfterValidator(_check_pattern)]


class LoraConfig(Section):
    r: int = Field(16, ge=1)
    """Rank of the adapter."""
    lora_alpha: int = Field(32, ge=1)
    """Numerator of the update's scale, which is ``lora_alpha / r`` (with ``use_rslora``: ``lora_alpha / sqrt(r)``)."""
    lora_dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Dropout on the adapter's input during training. Old logprobs, and so ratio, mismatch and its correction, are then
    computed without dropout before the first update, as the sampler does; this costs a forward pass."""
    target_modules: Literal["all-linear"] | Pattern | list[str] = "all-linear"
    """Hugging Face module names (``[q_proj, v_proj]``), a regular expression, or ``all-linear``."""
    target_parameters: list[str] = Field(default_factory=list)
    """Names of weights in transformers 5, which stacks a layer's experts: ``[gate_up_proj, down_proj]``. Gate and up
    then share one A, as in PEFT. Experts named in ``target_modules`` have a pair of matrices per linear instead."""
    save_experts: Literal["as_trained", "stacked", "per_expert"] = "as_trained"
    """Format of the final adapter's experts: ``stacked`` as in PEFT 0.21, ``per_expert`` as in vLLM and older PEFT."""
    use_rslora: bool = False
    """Use rank-stabilised scaling (Kalajdzievski 2023)."""
    rank_pattern: dict[Pattern, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    """Module name or pattern -> rank, for modules whose rank differs from ``r``."""
    alpha_pattern: dict[Pattern, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    """Module name or pattern -> alpha, for modules whose alpha differs from ``lora_alpha``."""
    init_from: str | None = None
    """A PEFT adapter directory to start from. Its own config replaces the fields above."""

    def peft_settings(self) -> dict[str, Any]:
        """Return the fields that PEFT's own ``LoraConfig`` has."""
        return self.model_dump(exclude={"init_from", "save_experts"})
