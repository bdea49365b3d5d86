# SPDX-License-Identifier: Apache-2.0
"""Test what happens before the first actor starts; the rest is in tests/e2e."""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.errors import UnsupportedError
from megarl.launch import actors as module


@pytest.mark.parametrize(("cores", "expected"), [(2, []), (16, ["start", "end"])])
def test_what_refuses_the_model_ends_ray_which_starts_meanwhile_only_on_many_cores(monkeypatch, cores, expected):
    started, events = threading.Event(), []

    def check_model(config):
        assert not expected or started.wait(10), "Ray was not started meanwhile"
        raise UnsupportedError("no such model")

    def start_ray(config, scratch):
        started.set()
        events.append("start")

    monkeypatch.setattr(module.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(module, "check_model", check_model)
    monkeypatch.setattr(module.ray_start, "start_ray", start_ray)
    monkeypatch.setattr(module.ray_start, "place", lambda config: pytest.fail("actors were placed"))
    monkeypatch.setattr(module.ray, "shutdown", lambda: events.append("end"))
    with pytest.raises(UnsupportedError, match="no such model"):
        with module.actors(None, SimpleNamespace(phase=print), Path(), Path(), Path()):
            pass
    assert events == expected
