# SPDX-License-Identifier: Apache-2.0
"""The adapter, by PEFT's own names."""

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
    """Rank."""
    lora_alpha: int = Field(32, ge=1)
    """The update is scaled by ``lora_alpha / r`` (``lora_alpha / sqrt(r)`` with ``use_rslora``)."""
    lora_dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Dropout on the adapter's input while training. Old logprobs, hence ratio, mismatch and its correction, are then
    computed without dropout before the first update, as the sampler computes; that costs a forward pass."""
    target_modules: Literal["all-linear"] | Pattern | list[str] = "all-linear"
    """Hugging Face module names (``[q_proj, v_proj]``), a regular expression, or ``all-linear``."""
    target_parameters: list[str] = Field(default_factory=list)
    """Weights by their names in transformers 5, which stacks a layer's experts: ``[gate_up_proj, down_proj]``. Gate and
    up then share one A, as in PEFT; experts named in ``target_modules`` have a pair of matrices for each linear."""
    save_experts: Literal["as_trained", "stacked", "per_expert"] = "as_trained"
    """The final adapter's experts: ``stacked`` as PEFT 0.21 saves them, or ``per_expert`` as vLLM and older PEFT do."""
    use_rslora: bool = False
    """Rank-stabilised scaling (Kalajdzievski 2023)."""
    rank_pattern: dict[Pattern, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    """Module name or pattern -> rank, where it differs from ``r``."""
    alpha_pattern: dict[Pattern, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    """Module name or pattern -> alpha, where it differs from ``lora_alpha``."""
    init_from: str | None = None
    """A PEFT adapter directory to start from; its own config replaces the fields above."""

    def peft_settings(self) -> dict[str, Any]:
        """Those of the fields that PEFT's own ``LoraConfig`` has."""
        return self.model_dump(exclude={"init_from", "save_experts"})
