# SPDX-License-Identifier: Apache-2.0
"""Time a call, independently of the machine's other work."""

import time
from collections.abc import Callable


def fastest(call: Callable[[], object], times: int = 3) -> float:
    """Return the seconds of the fastest of a few calls; the garbage collector or another process may interrupt one."""

    def seconds() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return min(seconds() for _ in range(times))
