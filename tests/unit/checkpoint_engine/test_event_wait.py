# SPDX-License-Identifier: Apache-2.0
"""Whoever waits for a device hears of a process that is gone, and gives up in time."""

import itertools
import time
from typing import Any

import pytest

from megarl.checkpoint_engine.transports.event_wait import AWAKE_SECONDS, wait_for
from megarl.errors import WeightSyncError


class Event:
    """Is reached at a time, or never."""

    def __init__(self, seconds: float = float("inf")) -> None:
        self.reached = time.monotonic() + seconds

    def query(self) -> bool:
        return time.monotonic() >= self.reached


def test_it_returns_when_the_event_is_reached() -> None:
    event: Any = Event(5 * AWAKE_SECONDS)
    wait_for(event, lambda: None, time.monotonic() + 10, "late")
    assert event.query()


def test_it_sleeps_only_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    slept, sleep = [], time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: (slept.append(seconds), sleep(seconds)))
    wait_for(Event(20 * AWAKE_SECONDS), lambda: None, time.monotonic() + 10, "late")  # type: ignore[arg-type]
    assert slept[0] == 0.0 and slept[-1] > 0.0


def test_a_process_that_is_gone_ends_it() -> None:
    looks = itertools.count()

    def check() -> None:
        if next(looks) == 3:
            raise WeightSyncError("receiver 1 is gone")

    with pytest.raises(WeightSyncError, match="receiver 1 is gone"):
        wait_for(Event(), check, time.monotonic() + 10, "late")  # type: ignore[arg-type]


def test_it_gives_up_at_its_deadline() -> None:
    with pytest.raises(WeightSyncError, match="broadcasts did not end in time"):
        wait_for(Event(), lambda: None, time.monotonic() + 0.05, "broadcasts did not end in time")  # type: ignore[arg-type]
