# SPDX-License-Identifier: Apache-2.0
"""A policy that says what it is told to, for tests of environments: no engine."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from megarl.environments import Client, Limits
from megarl.types import Completion

END = 0  # the id of <|end|>, see megarl.bench.character_tokenizer


class Policy:
    """Says one text after the other; its logprobs are -1, -2, ... and its version is the number of the turn."""

    def __init__(self, folder: Any, texts: Sequence[str]) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.texts, self.seen = list(texts), []

    async def draw(self, ids: np.ndarray, turn: int, most: int) -> Completion:
        """Answer a call of ``Client.sample``."""
        self.seen.append((ids, turn, most))
        said = self.encode(self.texts[turn % len(self.texts)] + "<|end|>")
        drawn = said[:most]
        logprobs = -np.arange(1, len(drawn) + 1, dtype=np.float32)
        reason = "stop" if len(drawn) == len(said) else "length"
        return Completion(ids, drawn, logprobs, np.full(len(drawn), turn), reason)

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text."""
        return np.array(self.tokenizer.encode(text, add_special_tokens=False), dtype=np.int64)

    def client(self, prompt: str = "q", template: Any = None, **limits: Any) -> Client:
        """Return a client of this policy, whose prompt is one message of a user."""
        ids = self.encode(f"<|user|>{prompt}<|end|><|assistant|>")
        given = {"turns": 8, "tokens": 200, "turn_tokens": 200, "seconds": 60.0} | limits
        return Client(ids, self.tokenizer, Limits(**given), self.draw, template or {})
