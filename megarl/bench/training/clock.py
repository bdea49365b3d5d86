# SPDX-License-Identifier: Apache-2.0
"""Time the phases of a step by marks on the device's time line, read when the step is over."""

import resource
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from megarl.loss.base import Loss, LossOutput, TokenBatch

GIB = 2**30


class Clock:
    """Times steps. Each phase of a step ends at a call of ``mark``; phases of the same name are added up."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.steps: list[dict[str, float]] = []
        self._marks: list[tuple[str, Any]] = []

    def time(self, step: Callable[[], None]) -> None:
        """Run a step and store the milliseconds of its phases and their ``total``."""
        self._synchronise()
        begin = time.perf_counter()
        self._marks = [("", self._now())]
        step()
        self._synchronise()
        total = (time.perf_counter() - begin) * 1e3
        phases: dict[str, float] = {}
        for (_, start), (name, end) in zip(self._marks, self._marks[1:], strict=False):
            phases[name] = phases.get(name, 0.0) + self._between(start, end)
        self.steps.append(phases | {"total": total})

    def mark(self, phase: str) -> None:
        """End the phase of this name here. Does not wait for the device."""
        self._marks.append((phase, self._now()))

    def mark_next_forward(self) -> None:
        """End the backward pass of the micro-batch before, if there is one."""
        if len(self._marks) > 1:
            self.mark("backward")

    def medians(self) -> dict[str, float]:
        """Return the median milliseconds of each phase over the steps since ``clear``."""
        return {name: median(step[name] for step in self.steps) for name in self.steps[0]}

    def clear(self) -> None:
        """Forget all steps (those of the warm-up), their peak memory, and the memory that torch has cached."""
        self.steps = []
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_gib(self) -> float:
        """Return the most memory that torch held since ``clear``; on a CPU, that of the process since its start.

        It counts reserved memory, not tensors: memory of CUDA graphs counts as free while they wait for their replay.
        """
        if self.device.type == "cpu":
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
        return torch.cuda.max_memory_reserved(self.device) / GIB

    def _now(self) -> Any:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        return (end - start) * 1e3 if self.device.type == "cpu" else start.elapsed_time(end)

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class MarkedLoss:
    """A loss that marks the end of phase ``logprobs`` when it receives them."""

    def __init__(self, loss: Loss, clock: Clock) -> None:
        self._loss, self._clock = loss, clock

    def __call__(self, logprobs_T: torch.Tensor, tokens: TokenBatch) -> LossOutput:
        """Return the loss's own result."""
        self._clock.mark("logprobs")
        return self._loss(logprobs_T, tokens)
