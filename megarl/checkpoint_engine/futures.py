# SPDX-License-Identifier: Apache-2.0
"""Run work in a thread, with its result as a future."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Start ``work`` in a thread of its own; its result or exception as a future.

    The thread is a daemon: a participant that never answers must not keep the process alive.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
