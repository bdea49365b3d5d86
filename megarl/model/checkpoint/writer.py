# SPDX-License-Identifier: Apache-2.0
"""Write checkpoints on a thread while training goes on."""

import logging
import threading
from collections.abc import Callable


class BackgroundWriter:
    """Runs one job at a time on a thread. A job's failure is logged at once and raised again by the next call.

    The thread is not a daemon, so the process waits for it at exit.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Wait for the previous job, then start this one.

        Raises:
            Exception: the previous job failed; this one was not started.
        """
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(job,), name="megarl-writer")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the running job, if any.

        Raises:
            Exception: the job failed. Raised once per failure.
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
            # Logged as well, because there may be no next call that raises it.
            logging.getLogger(__name__).error("%s", error)
            self._failure = error
