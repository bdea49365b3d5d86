# SPDX-License-Identifier: Apache-2.0
"""Whoever waits for a device hears of a process that is gone, and gives up in time."""

import itertools
import math
import time

import pytest

from megarl.checkpoint_engine.transports.collective import Backend
from megarl.checkpoint_engine.transports.event_wait import AWAKE_SECONDS, LOOK_SECONDS, wait_for
from megarl.errors import WeightSyncError

LATE = Backend("nccl", "cuda", lambda *given: None).late


class Event:
    """Work of a device that ends at the ``looks``-th look."""

    def __init__(self, looks: float) -> None:
        self.looks = looks

    def query(self) -> bool:
        self.looks -= 1
        return self.looks <= 0


def test_a_device_is_waited_for_as_long_as_the_others_live() -> None:
    looked: list[int] = []
    wait_for(Event(3), lambda: looked.append(1), time.monotonic() + 5, LATE)
    assert len(looked) == 2

    def gone() -> None:
        raise WeightSyncError("receiver 1 is gone")

    with pytest.raises(WeightSyncError, match="receiver 1 is gone"):
        wait_for(Event(math.inf), gone, time.monotonic() + 5, LATE)
    with pytest.raises(WeightSyncError, match="nccl transfer: broadcasts did not end in time"):
        wait_for(Event(math.inf), lambda: None, time.monotonic() + 0.1, LATE)


def test_it_sleeps_only_once_an_adapter_would_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, slept = itertools.count(), list[float]()
    monkeypatch.setattr(time, "monotonic", lambda: next(clock) * AWAKE_SECONDS / 2)
    monkeypatch.setattr(time, "sleep", slept.append)
    wait_for(Event(5), lambda: None, math.inf, LATE)
    assert slept == [0.0, 0.0, LOOK_SECONDS, LOOK_SECONDS]
