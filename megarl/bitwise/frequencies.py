# SPDX-License-Identifier: Apache-2.0
"""Compute the frequencies of rotary embeddings in float64, so that every processor rounds to the same float32."""

import math

import torch


def inverse_frequencies(base: float, rotated: int) -> torch.Tensor:
    """Return radians per position, ``base ** (-2 i / rotated)``, as float32 ``[rotated / 2]`` on the CPU."""
    powers = torch.arange(0, rotated, 2, dtype=torch.float64) / rotated
    return (base**-powers).float()


def llama3_frequencies(
    base: float, rotated: int, *, factor: float, low: float, high: float, original: int
) -> torch.Tensor:
    """Return Llama 3's frequencies: long waves are stretched by ``factor``, those in between partly.

    The formula is that of ``rope_type: llama3`` in transformers (``_compute_llama3_parameters``).

    Args:
        base: rope_theta.
        rotated: number of rotated features.
        factor, low, high: ``factor``, ``low_freq_factor`` and ``high_freq_factor`` of the config.
        original: its ``original_max_position_embeddings``.

    Returns:
        float32 ``[rotated / 2]`` on the CPU.
    """
    plain = base ** -(torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    turns = original * plain / (2 * math.pi)  # full turns within the original context
    smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return ((1 - smooth) * plain / factor + smooth * plain).float()
