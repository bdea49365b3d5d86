# SPDX-License-Identifier: Apache-2.0
"""Test what happens before the first actor starts; the rest is in tests/e2e."""

import threading
from pathlib import Path

import pytest

from megarl.errors import UnsupportedError
from megarl.launch import actors as module


def test_a_model_is_checked_while_ray_starts_and_what_refuses_it_ends_ray(monkeypatch):
    started, events = threading.Event(), []

    def check_model(config):
        assert started.wait(10), "Ray was not started meanwhile"
        raise UnsupportedError("no such model")

    def start_ray(config, scratch):
        started.set()
        events.append("start")

    monkeypatch.setattr(module, "check_model", check_model)
    monkeypatch.setattr(module.placement, "start_ray", start_ray)
    monkeypatch.setattr(module.placement, "place", lambda config: pytest.fail("actors were placed"))
    monkeypatch.setattr(module.ray, "shutdown", lambda: events.append("end"))
    with pytest.raises(UnsupportedError, match="no such model"):
        with module.actors(None, Screen(), Path(), Path(), Path()):
            pass
    assert events == ["start", "end"]


class Screen:
    """A screen without lines."""

    def phase(self, name):
        pass
