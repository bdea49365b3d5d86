# SPDX-License-Identifier: Apache-2.0
"""Make the functions by which ``MegatronModel`` adds adapters."""

from collections.abc import Mapping, Sequence
from typing import Any

from peft import LoraConfig

from megarl.lora.adapter import LoraAdapter
from megarl.lora.apply import apply_lora
from megarl.model.adapter import Attach
from megarl.peft.spec import AdapterSpec


def attach(config: LoraConfig, *, seed: int = 0) -> Attach:
    """Return the function by which ``MegatronModel`` adds one adapter.

    Args:
        config: PEFT's config.
        seed: seed of the initialisation.
    """
    return attach_all([AdapterSpec(config)], seed=seed)


def attach_all(specs: Sequence[AdapterSpec], *, seed: int = 0) -> Attach:
    """Return the function by which ``MegatronModel`` adds several adapters, in order."""

    def apply(chunks: list[Any], hf_config: Mapping[str, Any], groups: Any) -> list[LoraAdapter]:
        """See ``model.adapter.Attach``. Raises what ``apply_lora`` raises."""
        return [
            apply_lora(
                chunks,
                spec.config,
                hf_config,
                name=spec.name,
                trainable=spec.trainable,
                seed=seed,
                groups=groups,
            )
            for spec in specs
        ]

    return apply
