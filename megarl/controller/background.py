# SPDX-License-Identifier: Apache-2.0
"""Work that the loop starts and need not wait for."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Background:
    """Runs one function at a time in a thread; what it raises is raised where it is waited for."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._pending: Future[float] | None = None

    def start(self, function: Callable[[], None]) -> None:
        """Run a function, once the one before has ended."""
        self.wait()
        self._pending = self._pool.submit(_timed, function)

    def wait(self) -> float:
        """Wait for what was started; the seconds that it took, 0 where nothing was."""
        pending, self._pending = self._pending, None
        return pending.result() if pending else 0.0


def _timed(function: Callable[[], None]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
