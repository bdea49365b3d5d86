# SPDX-License-Identifier: Apache-2.0
"""Test who waits for whom when buckets are copied from another GPU; streams are stand-ins, which only note it."""

import contextlib
from typing import Any

import pytest
import torch

from megarl.checkpoint_engine.transports.staging import Staging


class Event:
    """A point of a stream, by what was done there last."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def synchronize(self) -> None:
        self._log.append(f"host waits for {self.name}")


class Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.count = name, log, 0

    def record_event(self) -> Event:
        self.count += 1
        return Event(f"{self.name} {self.count}", self.log)

    def wait_event(self, event: Event) -> None:
        self.log.append(f"{self.name} waits for {event.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    log: list[str] = []
    kernels = Stream("kernels", log)
    stand_ins: dict[str, Any] = {
        "Stream": lambda priority: Stream("copies", log),
        "current_stream": lambda: kernels,
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda: log.append("host waits for all"),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return log


def bucket(value: int, nbytes: int = 4) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


def test_a_copy_waits_for_the_kernels_that_read_its_slot_and_they_wait_for_it(log: list[str]) -> None:
    staging = Staging()
    assert staging.copy(bucket(1), 0).tolist() == [1] * 4
    assert log == ["host waits for all", "kernels waits for copies 1"]
    log.clear()
    staging.copy(bucket(2), 1)
    staging.wait(last=False)
    # The sender may fill its first buffer again as soon as that has been copied, whatever the kernels do.
    assert log == ["host waits for all", "kernels waits for copies 2", "host waits for copies 1"]
    log.clear()
    third = staging.copy(bucket(3, nbytes=3), 0)
    staging.wait(last=False)
    assert third.tolist() == [3] * 3
    # The kernels that read the first bucket were started before the second came: event 1 of their stream.
    assert log == ["copies waits for kernels 1", "kernels waits for copies 3", "host waits for copies 2"]
    log.clear()
    staging.wait(last=True)
    assert log == ["host waits for copies 3"]


def test_the_next_transfer_may_begin_with_the_slot_that_the_last_one_ended_with(log: list[str]) -> None:
    staging = Staging()
    staging.copy(bucket(1), 0)
    staging.wait(last=True)
    log.clear()
    assert staging.copy(bucket(2), 0).tolist() == [2] * 4
    assert log == ["copies waits for kernels 1", "kernels waits for copies 2"]


def test_a_larger_bucket_gets_new_memory_once_nothing_uses_the_old(log: list[str]) -> None:
    staging = Staging()
    staging.copy(bucket(1), 0)
    log.clear()
    assert staging.copy(bucket(2, nbytes=8), 0).tolist() == [2] * 8
    assert log == ["host waits for all", "kernels waits for copies 2"]
    staging.clear()
    staging.wait(last=True)
    assert log[-1] == "host waits for all"
