# SPDX-License-Identifier: Apache-2.0
"""Refuse sequences that are too long for a model of transformers."""

from typing import Any

from megarl.config import TrainerConfig
from megarl.errors import ConfigError, UnsupportedError


def check_longest(config: Any, trainer: TrainerConfig) -> None:
    """Refuse a run whose longest sequence is too long; see ``check_length``."""
    if trainer.longest is not None:
        check_length(config, trainer.longest, "sampler.max_prompt_tokens + sampler.max_response_tokens")


def check_length(config: Any, length: int, subject: str) -> None:
    """Refuse a sequence that the model has no positions for, or computes differently beside others in a pack.

    With longrope, transformers takes short or long factors once per pass, by the largest position in the pack.

    Args:
        config: config of the text model.
        length: tokens of the longest sequence.
        subject: names what has this length, for the message.

    Raises:
        ConfigError: it exceeds ``max_position_embeddings``.
        UnsupportedError: it exceeds the original length of longrope.
    """
    positions: int | None = getattr(config, "max_position_embeddings", None)
    if positions is not None and length > positions:
        raise ConfigError(f"{subject} ({length}) exceeds the model's max_position_embeddings ({positions})")
    given = getattr(config, "rope_parameters", None) or {}
    # One section for all layers, or one for each kind of layers.
    for rope in [given, *(value for value in given.values() if isinstance(value, dict))]:
        if rope.get("rope_type") != "longrope":
            continue
        original: int = rope["original_max_position_embeddings"]
        if length > original:
            raise UnsupportedError(
                f"config.json: its longrope RoPE changes beyond {original} tokens "
                f"(original_max_position_embeddings), but {subject} is {length}; supported are sequences up to there"
            )
