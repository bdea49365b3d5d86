# SPDX-License-Identifier: Apache-2.0
"""A stream of prompts that are told apart by their number."""

import numpy as np

from megarl.controller.rollouts.data import PromptStream
from megarl.types import Prompt


class Numbers:
    """The prompts 0, 1, 2, ..., each a question mark."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(str(index), ({"role": "user", "content": "?"},))


def number_stream(count: int) -> PromptStream:
    """Return a stream of ``count`` prompts; the only token of each is its number."""
    return PromptStream(Numbers(count), lambda prompt: np.array([int(prompt.id)]), seed=3)
