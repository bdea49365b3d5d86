# SPDX-License-Identifier: Apache-2.0
"""Group the settings that a trained model needs; a run's config holds more."""

from dataclasses import dataclass, field

from megarl.config.sections.lora import LoraConfig
from megarl.config.sections.model import ModelConfig
from megarl.config.sections.parallel import ParallelConfig
from megarl.config.sections.train import TrainConfig


@dataclass(frozen=True)
class TrainerConfig:
    """Settings of ``MegatronModel``.

    Attributes:
        model, parallel, lora, train: sections of the config.
        temperature: the policy is ``softmax(logits / temperature)``.
        longest: tokens of the longest sequence, checked once against the model's positions. None: each batch is
            checked.
    """

    model: ModelConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    temperature: float = 1.0
    longest: int | None = None
