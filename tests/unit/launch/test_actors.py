# SPDX-License-Identifier: Apache-2.0
"""Test what happens before the first actor starts; the rest is in tests/e2e."""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.errors import ConfigError, UnsupportedError, WorkerError
from megarl.launch import actors as module
from megarl.launch.placement import ray_start


@pytest.mark.parametrize(("cores", "expected"), [(2, ["end"]), (16, ["start", "end"])])
def test_what_refuses_the_model_ends_ray_which_starts_meanwhile_only_on_many_cores(monkeypatch, cores, expected):
    started, events = threading.Event(), []

    def check_model(config):
        assert cores == 2 or started.wait(10), "Ray was not started meanwhile"
        raise UnsupportedError("no such model")

    def start(config, scratch):
        started.set()
        events.append("start")

    monkeypatch.setattr(module.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(module, "check_model", check_model)
    monkeypatch.setattr(ray_start, "start_ray", start)
    monkeypatch.setattr(ray_start, "place", lambda config: pytest.fail("actors were placed"))
    monkeypatch.setattr(ray_start.ray, "shutdown", lambda: events.append("end"))
    with (
        pytest.raises(UnsupportedError, match="no such model"),
        ray_start.ray_for(None, Path()) as ray_is_there,
        module.actors(None, SimpleNamespace(phase=print), Path(), Path(), ray_is_there),
    ):
        pass
    assert events == expected


def test_a_run_that_cannot_be_prepared_waits_for_the_ray_that_starts_beside_it_and_ends_it(monkeypatch):
    going, events = threading.Event(), []
    monkeypatch.setattr(ray_start.os, "cpu_count", lambda: 16)
    monkeypatch.setattr(ray_start, "start_ray", lambda *_: events.append("start" if going.wait(10) else "late"))
    monkeypatch.setattr(ray_start.ray, "shutdown", lambda: events.append("end"))
    with pytest.raises(ConfigError, match="no such task"), ray_start.ray_for(None, Path()):
        threading.Timer(0.2, going.set).start()
        raise ConfigError("no such task")
    assert events == ["start", "end"]


def test_a_ray_that_does_not_start_is_named_where_it_is_waited_for(monkeypatch):
    def fail(config, scratch):
        raise WorkerError("Ray did not start")

    monkeypatch.setattr(ray_start, "start_ray", fail)
    for cores in (2, 16):
        monkeypatch.setattr(ray_start.os, "cpu_count", lambda cores=cores: cores)
        with ray_start.ray_for(None, Path()) as ray_is_there, pytest.raises(WorkerError, match="did not start"):
            ray_is_there()
