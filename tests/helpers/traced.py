# SPDX-License-Identifier: Apache-2.0
"""Fixtures of tests that start programs: a free port, and an environment that marks every process of a test."""

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
    """An environment with a mark that every descendant inherits, however it detaches itself."""

    def __init__(self) -> None:
        self.mark = f"MEGARL_TEST_MARK={uuid.uuid4().hex}"
        name, value = self.mark.split("=")
        # Ray's variables of this process must not leak in. MEGARL_PYTHON has every package, so nothing is installed.
        kept = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        self.environment = kept | {
            name: value,
            "MEGARL_PYTHON": sys.executable,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }

    def processes(self) -> list[psutil.Process]:
        """Return every live process that inherited the mark."""
        processes = []
        for process in psutil.process_iter():
            try:
                if self.mark in (f"{k}={v}" for k, v in process.environ().items()):
                    processes.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return [process for process in processes if process.status() != psutil.STATUS_ZOMBIE]

    def wait_until_gone(self, seconds: float = 5.0) -> list[str]:
        """Return the command lines of processes that are left after ``seconds``."""
        deadline = time.monotonic() + seconds
        while (remaining := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return [" ".join(process.cmdline()) for process in remaining]


@pytest.fixture
def traced() -> Iterator[Traced]:
    """Yield a marked environment; at the end kill the processes that a failing test left."""
    trace = Traced()
    yield trace
    for process in trace.processes():
        process.kill()


@pytest.fixture
def port() -> int:
    """Return a port that is free at present, outside the range of outgoing connections."""
    for candidate in range(20000 + os.getpid() % 5000, 32000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", candidate))
            except OSError:
                continue
            return candidate
    raise RuntimeError("no free port")
