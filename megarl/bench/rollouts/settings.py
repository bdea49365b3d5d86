# SPDX-License-Identifier: Apache-2.0
"""Define the settings of `megarl bench rollout`."""

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from megarl.bench.settings import Measured, model_config, parse
from megarl.errors import UnsupportedError
from megarl.families import family_of


class RolloutBenchSettings(Measured):
    """The settings of `bench rollout`."""

    contents: list[Literal["adapter", "merged"]] = Field(["adapter", "merged"], min_length=1)
    """Engines to measure: ``adapter`` has LoRA and samples with an adapter and from the base;
    ``merged`` has none, as ``checkpoint_engine.content`` says."""
    plain: list[Literal["adapter", "merged"]] = Field(["adapter"])
    """Engines of ``vllm.LLM`` to measure beside them, without anything of megarl."""
    concurrency: list[int] = Field([32, 128, 512], min_length=1)
    """Numbers of completions that are asked for at once; each a multiple of ``samples``."""
    samples: int = Field(8, ge=2)
    """Completions of each prompt."""
    prompt_tokens: int = Field(128, ge=1)
    """Tokens of a prompt."""
    response_tokens: int = Field(256, ge=1)
    """Most tokens of a completion; those of a named shape have as many."""
    r: int = Field(16, ge=1)
    """Rank of the adapter, on all linears."""
    rounds: int = Field(2, ge=1)
    """Timed rounds at each concurrency, after a call that is not timed."""
    kv_cache_gib: float = Field(24.0, gt=0.0)
    """``sampler.kv_cache_gib``."""

    @model_validator(mode="after")
    def _whole_prompts(self) -> Self:
        for one in self.concurrency:
            if one < self.samples or one % self.samples:
                raise ValueError(f"concurrency {one} must be a multiple of samples ({self.samples})")
        return self


# What fits the smallest shape, on a CPU.
TINY_ROLLOUT = {
    "concurrency": [4, 16], "samples": 4, "prompt_tokens": 16, "response_tokens": 16, "kv_cache_gib": 0.1
}  # fmt: skip


def parse_rollout_settings(model: str, overrides: Sequence[str] = ()) -> RolloutBenchSettings:
    """Parse the settings of `bench rollout`; arguments and errors as ``settings.parse``.

    Raises:
        UnsupportedError: the model is a mixture of experts.
    """
    settings = parse(RolloutBenchSettings, model, dict(TINY_ROLLOUT) if model == "tiny" else {}, overrides)
    if family_of(model_config(settings.model)).moe:
        raise UnsupportedError(f"bench rollout: '{model}' is a mixture of experts; dense models can be measured")
    return settings
