# SPDX-License-Identifier: Apache-2.0
"""Run work in a thread while the loop goes on."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Background:
    """Runs one function at a time in a thread. ``wait`` raises what the function raised."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._pending: Future[float] | None = None

    def start(self, function: Callable[[], None]) -> None:
        """Run a function, after the one before has ended."""
        self.wait()
        self._pending = self._pool.submit(_timed, function)

    def wait(self) -> float:
        """Wait for the function that was started; return the seconds that it took, 0 if none was started."""
        pending, self._pending = self._pending, None
        return pending.result() if pending else 0.0


def _timed(function: Callable[[], None]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
