# SPDX-License-Identifier: Apache-2.0
"""The thread that writes checkpoints while training goes on."""

import logging
import threading
from collections.abc import Callable


class BackgroundWriter:
    """Runs one job at a time on a thread. A job's failure is logged at once and raised by the next call.

    The thread is not a daemon: a process that ends in the ordinary way waits for it.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Wait for the job before, then start this one.

        Raises:
            Exception: what the job before raised; this one is not started.
        """
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(job,), name="megarl-writer")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the running job, if any.

        Raises:
            Exception: what it raised; only once.
        """
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            # Logged too: nobody may ever call again.
            logging.getLogger(__name__).error("%s", error)
            self._failure = error
