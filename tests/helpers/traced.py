# SPDX-License-Identifier: Apache-2.0
"""Fixtures of tests that start programs: a free port, and finding every process that a test started."""

import os
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]


class Traced:
    """An environment whose mark every descendant inherits, however it detaches itself."""

    def __init__(self) -> None:
        self.mark = f"MEGARL_TEST_MARK={uuid.uuid4().hex}"
        name, value = self.mark.split("=")
        # Ray and pytest's own environment must not leak in. This interpreter has everything: nothing is installed.
        kept = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        self.environment = kept | {
            name: value,
            "MEGARL_PYTHON": sys.executable,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }

    def processes(self) -> list[psutil.Process]:
        """Every live process that inherited the mark."""
        found = []
        for process in psutil.process_iter():
            try:
                if self.mark in (f"{k}={v}" for k, v in process.environ().items()):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]

    def wait_until_gone(self, seconds: float = 5.0) -> list[str]:
        """Command lines that are still there after ``seconds``."""
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return [" ".join(process.cmdline()) for process in left]


@pytest.fixture
def traced() -> Iterator[Traced]:
    """A marked environment; whatever a failing test leaves behind is killed."""
    trace = Traced()
    yield trace
    for process in trace.processes():
        process.kill()


@pytest.fixture
def port() -> int:
    """A port that was free a moment ago, outside the range of outgoing connections."""
    for candidate in range(20000 + os.getpid() % 5000, 32000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", candidate))
            except OSError:
                continue
            return candidate
    raise RuntimeError("no free port")
