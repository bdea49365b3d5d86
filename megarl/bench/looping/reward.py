# SPDX-License-Identifier: Apache-2.0
"""Score random tokens."""

from megarl.types import DecodedCompletion, Prompt


def reward(prompt: Prompt, completion: DecodedCompletion) -> float:
    """Return a number that differs between completions of a model that answers nothing."""
    return sum(map(int, completion.response_ids)) % 8 / 8
