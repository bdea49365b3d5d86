# SPDX-License-Identifier: Apache-2.0
"""How long a call takes, whatever else the machine does."""

import time
from collections.abc import Callable


def fastest(call: Callable[[], object], times: int = 3) -> float:
    """Seconds of the fastest of a few calls; one may be interrupted by the garbage collector or another process."""

    def seconds() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return min(seconds() for _ in range(times))
