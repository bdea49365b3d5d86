# SPDX-License-Identifier: Apache-2.0
"""Call a child process that runs ``megarl.sampler.serve``.

Calls overlap, so that a sync can arrive while another version still decodes. There are two ``lines``: a thread reads
the answers of one, and whoever waits reads those of the other.
"""

import os
import select
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from multiprocessing import connection
from pathlib import Path
from typing import Any

import psutil

from megarl.errors import WorkerError
from megarl.futures.lines import DirectLine, Line
from megarl.sampler.serve import STOP

# A child that was asked to stop is killed after this many seconds. vLLM gives its own processes 5 to 15.
CLOSE_SECONDS = 30.0


class Child:
    """A child process, and the calls to it. It ends with its parent in any case.

    Args:
        name: the child's, for messages.
        variables: its environment.
        log: file that takes what it prints; default: this process's standard error.
        module: what it runs, with the numbers of both pipes' descriptors as arguments.

    Attributes:
        process: the child.
        direct: calls whose answers are read by whoever waits for them. For few short ones that must be fast.
    """

    def __init__(
        self, name: str, variables: Mapping[str, str], log: str | Path | None, module: str = "megarl.sampler.serve"
    ) -> None:
        self._name, self._log = name, log
        self._ended, self._ending = threading.Event(), threading.Lock()
        ours, theirs = zip(*(connection.Pipe() for _ in range(2)), strict=True)
        self._line, self.direct = Line(ours[0], self._death), DirectLine(ours[1], self._death)
        numbers = [one.fileno() for one in theirs]
        with open(log, "ab") if log else nullcontext(sys.stderr) as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, numbers)],
                stdin=subprocess.DEVNULL,
                stdout=output,  # what the parent prints on its standard output is its own
                stderr=output,
                pass_fds=numbers,
                env=dict(variables),
                start_new_session=True,  # vLLM's processes stay in the child's group, which can be ended as one
            )
        for one in theirs:
            one.close()
        threading.Thread(target=self._read, daemon=True).start()

    def call(self, method: str, *arguments: Any) -> Future:
        """Call a method of the child's sampler; its result or error as a future. Never waits for the child."""
        return self._line.call(method, *arguments)

    def close(self) -> None:
        """Stop the child and all processes that it started; may be called twice."""
        # Said, because closing this end would not reach the child while `_read` waits on it.
        self._line.tell(STOP)
        self._ended.wait(CLOSE_SECONDS)
        self._end()
        for line in (self._line, self.direct):
            line.pipe.close()
            line.end()

    def _read(self) -> None:
        """Give answers to those who wait, until the child or this process closes the pipe."""
        with suppress(EOFError, OSError):
            # The pipe alone would not do: a process that vLLM forks holds the child's end too.
            child, poll = os.pidfd_open(self.process.pid), select.poll()
            poll.register(self._line.pipe, select.POLLIN)
            poll.register(child, select.POLLIN)
            try:
                while self._line.pipe.fileno() in dict(poll.poll()):
                    self._line.take()
            finally:
                os.close(child)
        self._ended.set()
        self._end()  # the direct line's other end closes with it
        self._line.end()

    def _end(self) -> int:
        """Kill what is left of the child and of vLLM's processes; return the child's status."""
        with self._ending:
            # Once it has been waited for, the group's number could be another's.
            if self.process.returncode is None:
                for process in psutil.process_iter():
                    with suppress(psutil.Error, ProcessLookupError):
                        # multiprocessing's tracker removes what the others leave, and ends by itself.
                        tracks = "resource_tracker" in " ".join(process.cmdline())
                        if os.getpgid(process.pid) == self.process.pid and not tracks:
                            process.kill()
            return self.process.wait()

    def _death(self) -> WorkerError:
        """End what is left, and return why the child answers no more."""
        status = self._end()
        log = f"; its log: {self._log}" if self._log else ""
        return WorkerError(f"the process of {self._name} ended with status {status}{log}")
