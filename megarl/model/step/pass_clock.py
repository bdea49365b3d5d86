# SPDX-License-Identifier: Apache-2.0
"""Measure how long the forward and backward passes of a step take on the device.

mcore's schedules call ``config.timers(name)`` around the passes of each micro-batch; this class stands there.
"""

import time
from collections import deque
from typing import Any

import torch

# mcore's name of a pass -> ours.
PASSES = {"forward-compute": "forward", "backward-compute": "backward"}
# Passes that are kept until ``read``, which not every user calls.
KEPT = 10_000


class PassClock:
    """Adds up the time of forward and backward passes while ``running``.

    Times on a GPU are between events on its time line, without waiting for it; waits for other ranks inside a pass
    count. On a CPU they are wall time.

    Attributes:
        running: True while passes are measured.
    """

    def __init__(self, device: torch.device) -> None:
        self.running = False
        self._on_gpu = device.type == "cuda"
        self._begun: dict[str, Any] = {}
        self._spans: dict[str, deque[tuple[Any, Any]]] = {name: deque(maxlen=KEPT) for name in PASSES.values()}

    def __call__(self, name: str, log_level: int | None = None) -> "_Timer":
        """Return the timer of a name of mcore's; those of other things than passes measure nothing."""
        return _Timer(self, PASSES.get(name))

    def start(self, name: str) -> None:
        """Begin a pass, ``forward`` or ``backward``."""
        if self.running:
            self._begun[name] = self._now()

    def stop(self, name: str) -> None:
        """End the pass that ``start`` began."""
        if name in self._begun:
            self._spans[name].append((self._begun.pop(name), self._now()))

    def read(self) -> dict[str, float]:
        """Return ``forward_seconds`` and ``backward_seconds`` since the last call; waits for the device."""
        seconds = {}
        for name, spans in self._spans.items():
            seconds[f"{name}_seconds"] = sum(self._between(*span) for span in spans)
            spans.clear()
        return seconds

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        if not self._on_gpu:
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1e3


class _Timer:
    """mcore's interface of one timer."""

    def __init__(self, clock: PassClock, name: str | None) -> None:
        self._clock, self._name = clock, name

    def start(self, barrier: bool = False) -> None:
        if self._name is not None:
            self._clock.start(self._name)

    def stop(self, barrier: bool = False) -> None:
        if self._name is not None:
            self._clock.stop(self._name)
