# SPDX-License-Identifier: Apache-2.0
"""Group the settings of one sampler engine; a run's config holds more."""

from dataclasses import dataclass, field
from typing import Literal

from megarl.config.sections.checkpoint_engine import CheckpointEngineConfig
from megarl.config.sections.lora import LoraConfig
from megarl.config.sections.model import ModelConfig
from megarl.config.sections.sampler import SamplerConfig


@dataclass(frozen=True)
class EngineConfig:
    """Settings of ``VllmSampler``.

    Attributes:
        model, lora, sampler, checkpoint_engine: sections of the config.
        device: ``train.device``.
        longest_response: most tokens of any completion; None: ``sampler.max_response_tokens``.
        most_requests: most completions that the engine is asked for at once; None: unknown. More are served too.
    """

    model: ModelConfig
    lora: LoraConfig = field(default_factory=LoraConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    checkpoint_engine: CheckpointEngineConfig = field(default_factory=CheckpointEngineConfig)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    longest_response: int | None = None
    most_requests: int | None = None
