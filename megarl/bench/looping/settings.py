# SPDX-License-Identifier: Apache-2.0
"""Define the settings of `megarl bench loop`."""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from megarl.bench.settings import Measured, parse
from megarl.errors import ConfigError

Way = Literal["turns", "side"]
# Settings of the recipe that follow from those of the bench.
OWN = {
    "model.path": "MODEL_OR_SHAPE",
    "train.steps": "steps and warmup",
    "train.max_staleness": "ways and staleness",
    "train.output": "--out",
}
# What fits the smallest shapes, on a CPU.
TINY: dict[str, Any] = {
    "prompts": 2, "samples": 4, "response_tokens": 8, "r": 4, "micro_batch_tokens": 256, "kv_cache_gib": 0.05,
    "steps": 2, "warmup": 1,
}  # fmt: skip


class LoopBenchSettings(Measured):
    """The settings of `bench loop`. All else is a setting of the recipe."""

    ways: list[Way] = Field(["turns", "side"], min_length=1)
    """``turns``: sampling and training in turns. ``side``: side by side (``train.max_staleness``)."""
    prompts: int = Field(64, ge=1)
    """``train.prompts_per_step``."""
    samples: int = Field(8, ge=2)
    """``sampler.samples_per_prompt``."""
    response_tokens: int = Field(256, ge=1)
    """``sampler.max_response_tokens``; completions of a named shape have as many."""
    r: int = Field(32, ge=1)
    """Rank of the adapter, on all linears."""
    micro_batch_tokens: int = Field(16384, ge=1)
    """``train.micro_batch_tokens``."""
    kv_cache_gib: float = Field(40.0, gt=0.0)
    """``sampler.kv_cache_gib``."""
    staleness: int = Field(2, ge=1)
    """``train.max_staleness`` side by side."""
    steps: int = Field(6, ge=1)
    """Timed steps of each way; their means are reported."""
    warmup: int = Field(2, ge=0)
    """Steps before them. Side by side there are ``staleness + 1`` more, which use up what was sampled before the first
    update, and ``staleness`` after the timed ones, for which nothing more is sampled."""

    def warmup_of(self, way: Way) -> int:
        """Return the number of steps of a run that are not timed."""
        return self.warmup + (self.staleness + 1 if way == "side" else 0)

    def steps_of(self, way: Way) -> int:
        """Return the number of steps of a run."""
        return self.warmup_of(way) + self.steps + (self.staleness if way == "side" else 0)


def parse_loop_settings(model: str, overrides: Sequence[str] = ()) -> tuple[LoopBenchSettings, list[str]]:
    """Parse the settings of `bench loop`; arguments and errors as ``settings.parse``.

    Returns:
        The settings, and the overrides whose keys have a dot (``parallel.data=2``). Those are the recipe's, which
        ``bench_loop`` checks.

    Raises:
        ConfigError: also if one of them is set by the bench.
    """
    of_recipe = [override for override in overrides if "." in override.partition("=")[0]]
    for key in OWN.keys() & {override.partition("=")[0] for override in of_recipe}:
        raise ConfigError(f"bench loop sets {key} itself; use {OWN[key]}")
    own = [override for override in overrides if override not in of_recipe]
    return parse(LoopBenchSettings, model, TINY if model in ("tiny", "tiny-moe") else {}, own), of_recipe
