# SPDX-License-Identifier: Apache-2.0
"""Tell where the time between the command and the first step went."""

import time
from collections.abc import Mapping

import psutil

# The phase that ends the start-up.
FIRST = "sample"


class StartTimes:
    """Collects the phases of a start-up, one after the other, and what happens side by side within one.

    Args:
        began: time of the command (``time.time()``); default: the start of this process.

    Attributes:
        seconds: those of the whole start-up; None until it has ended.
    """

    def __init__(self, began: float | None = None) -> None:
        self._began = psutil.Process().create_time() if began is None else began
        self._phases: list[tuple[str, float]] = [("imports", self._began)]
        self._parts: dict[str, list[str]] = {}
        self.seconds: float | None = None

    def phase(self, name: str) -> str | None:
        """Begin a phase. Returns the table if it is the one that ends the start-up."""
        now = time.time()
        if self.seconds is not None:
            return None
        if name == FIRST:
            self.seconds = now - self._began
            return self._table(now, self.seconds)
        if name != self._phases[-1][0]:
            self._phases.append((name, now))
        return None

    def parts(self, name: str, seconds: Mapping[str, float]) -> None:
        """Note what a participant did in the current phase of the start-up, side by side with others."""
        if self.seconds is not None:  # it starts again
            return
        text = ", ".join(f"{part} {value:.1f}" for part, value in seconds.items())
        self._parts.setdefault(self._phases[-1][0], []).append(f"{name}: {text}")

    def _table(self, now: float, seconds: float) -> str:
        """Return a line for each phase, with its seconds, and below it those of its participants."""
        lines = [f"start-up: {seconds:.1f} s from the command to the first step"]
        ends = [began for _, began in self._phases[1:]] + [now]
        for (name, began), end in zip(self._phases, ends, strict=True):
            lines.append(f"  {end - began:6.1f} s  {name}")
            lines += [f"            {text}" for text in self._parts.pop(name, [])]
        return "\n".join(lines)
