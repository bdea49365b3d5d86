# SPDX-License-Identifier: Apache-2.0
"""Check token ids before vLLM gets them."""

import numpy as np

from megarl.errors import DataError


def check_prompt(number: int, prompt: np.ndarray, most: int, room: int, vocabulary: int) -> None:
    """Refuse prompts that vLLM would truncate, reject or crash on.

    Args:
        number: index of the prompt, for messages.
        prompt: token ids.
        most: ``sampler.max_prompt_tokens``.
        room: tokens of an episode's earlier turns that may follow the prompt.
        vocabulary: size of the vocabulary; 0 if it is not known.

    Raises:
        DataError: it is not int64 ``[P]``, too long, empty, or holds an unknown token.
    """
    if prompt.ndim != 1 or prompt.dtype != np.int64:
        raise DataError(f"prompt {number} must be one-dimensional int64, got {prompt.dtype} {prompt.shape}")
    if not 1 <= len(prompt) <= most + room:
        raise DataError(
            f"prompt {number} has {len(prompt)} tokens; allowed are 1 to {most + room}: sampler.max_prompt_tokens"
            + (f", and {room} for the turns before" if room else "")
        )
    if vocabulary and (prompt.min() < 0 or prompt.max() >= vocabulary):
        raise DataError(f"prompt {number} holds a token outside the vocabulary of {vocabulary}")
