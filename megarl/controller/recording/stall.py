# SPDX-License-Identifier: Apache-2.0
"""Warn when a run learns nothing, and say what to change."""

from collections.abc import Mapping
from typing import Any

# Steps in a row without a gradient before the first warning. It is repeated each time their number has doubled.
PATIENCE = 5


class StallWatch:
    """Counts the consecutive steps in which nothing was learned."""

    def __init__(self) -> None:
        self._idle = 0
        self._next = PATIENCE

    def look(self, row: Mapping[str, Any]) -> str | None:
        """Return the warning that is due after a step, or None.

        Args:
            row: the step's metrics; ``groups_without_signal`` (share, 0 to 1), ``grad_norm`` and ``reward`` are used.
        """
        flat = row.get("groups_without_signal") == 1.0
        if not flat and row.get("grad_norm") != 0.0:
            self._idle, self._next = 0, PATIENCE
            return None
        self._idle += 1
        if self._idle < self._next:
            return None
        self._next *= 2
        since = f"WARNING: nothing was learned in the last {self._idle} steps: "
        if flat:
            return (
                f"{since}the completions of each prompt all had the same reward (mean {row['reward']:.3g} in this "
                "step), so every advantage is 0. Read rollouts/: where all are wrong, take easier "
                "prompts or give scores for parts of the answer (task.reward); where all are right, take harder ones "
                "or stop. Where few differ, raise sampler.samples_per_prompt or sampler.temperature"
            )
        return (
            f"{since}the gradient is 0 though rewards differ. Nothing reaches the adapter: check that "
            "lora.target_modules names layers that the loss depends on, and that loss.clip_low, loss.clip_high, "
            "loss.importance_cap and loss.truncated leave tokens to train on"
        )
