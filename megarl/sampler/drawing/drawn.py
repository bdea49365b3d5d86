# SPDX-License-Identifier: Apache-2.0
"""Hold what has been drawn of a completion that may take several requests to vLLM."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megarl.errors import WorkerError
from megarl.types import Completion

# vLLM's finish reason of an aborted request.
ABORTED = "abort"


@dataclass
class Drawn:
    """The tokens drawn so far of one completion.

    Attributes:
        ids, logprobs, versions: one entry per token.
        finish_reason: of vLLM; ``"abort"`` while the completion has to go on.
    """

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str = ABORTED

    def forget(self) -> None:
        """Drop all tokens."""
        self.ids, self.logprobs, self.versions = [], [], []

    def add(self, output: Any, logprobs: np.ndarray, version: int) -> None:
        """Append vLLM's output of one request, with its tokens' logprobs, float32 ``[T]``."""
        self.ids += output.token_ids
        self.logprobs += logprobs.tolist()
        self.versions += [version] * len(output.token_ids)
        self.finish_reason = output.finish_reason

    def completion(self, prompt: np.ndarray, name: str) -> Completion:
        """Convert to a Completion.

        Args:
            prompt: int64 ``[P]``.
            name: the engine's, for messages.

        Raises:
            WorkerError: anything is incomplete.
        """
        logprobs = np.asarray(self.logprobs, dtype=np.float32)
        if self.finish_reason not in ("stop", "length") or not self.ids:
            raise WorkerError(f"{name}: a completion ended with {self.finish_reason!r}")
        if not np.isfinite(logprobs).all():
            raise WorkerError(f"{name}: a completion has a logprob that is not finite")
        return Completion(
            prompt_ids=np.asarray(prompt, dtype=np.int64),
            response_ids=np.asarray(self.ids, dtype=np.int64),
            logprobs=logprobs,
            versions=np.asarray(self.versions, dtype=np.int64),
            finish_reason=self.finish_reason,
        )
