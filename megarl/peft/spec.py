# SPDX-License-Identifier: Apache-2.0
"""Say which adapters a model gets, whatever computes it."""

from dataclasses import dataclass

from peft import LoraConfig


@dataclass(frozen=True)
class AdapterSpec:
    """One adapter of a model.

    Attributes:
        config: PEFT's config.
        name: tells the model's adapters apart; no file contains it.
        trainable: False for a frozen adapter.
    """

    config: LoraConfig
    name: str = "default"
    trainable: bool = True
