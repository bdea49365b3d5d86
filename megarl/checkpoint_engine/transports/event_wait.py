# SPDX-License-Identifier: Apache-2.0
"""Wait for a device whose work may need other processes, as long as they live."""

import time
from collections.abc import Callable

import torch

from megarl.errors import WeightSyncError

# Seconds in which it looks again and again: an adapter has come by then, and the shortest sleep takes 0.1 ms.
AWAKE_SECONDS = 2e-3
# Between two looks after that.
LOOK_SECONDS = 5e-5


def wait_for(event: torch.Event, check: Callable[[], object], deadline: float, late: str) -> None:
    """Wait for an event.

    Args:
        event: of a device.
        check: raises if a process is gone that the device waits for; called between two looks.
        deadline: when to give up, by ``time.monotonic``.
        late: the message then.

    Raises:
        WeightSyncError: ``check`` raised it, or the deadline has passed.
    """
    began = time.monotonic()
    while not event.query():
        check()
        now = time.monotonic()
        if now > deadline:
            raise WeightSyncError(late)
        time.sleep(LOOK_SECONDS if now - began > AWAKE_SECONDS else 0.0)  # other threads get their turn
