# SPDX-License-Identifier: Apache-2.0
"""Measure the stages of a transfer, on either side."""

import time


class Stages:
    """Wall seconds of the stages of one transfer. On a GPU a stage that does not wait ends in the next that does."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def begin(self) -> None:
        """Forget all stages; the first begins."""
        self.seconds, self._last = {}, time.perf_counter()

    def end(self, stage: str) -> None:
        """End a stage, and begin the next."""
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now
