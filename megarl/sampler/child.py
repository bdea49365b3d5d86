# SPDX-License-Identifier: Apache-2.0
"""Call a child process that runs ``megarl.sampler.serve``.

The two exchange pickled tuples: ``(number, method, arguments)`` there, ``(number, succeeded, result or exception)``
back. Calls overlap, so that a sync can arrive while another version still decodes. There are two pipes. A thread reads
the answers of one; those of the other are read by whoever waits for them (``direct_line``).
"""

import itertools
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
from megarl.sampler.direct_line import DirectLine, fail, settle
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
        self._numbers, self._waiting, self._lock = itertools.count(), dict[int, Future](), threading.Lock()
        # Held while a call is sent, which may take long: `_read` must go on meanwhile, so it never takes this one.
        self._sending = threading.Lock()
        self._ended, self._ending = threading.Event(), threading.Lock()
        self._connection, theirs = connection.Pipe()
        directly, theirs_directly = connection.Pipe()
        self.direct = DirectLine(directly, self._death)
        numbers = [one.fileno() for one in (theirs, theirs_directly)]
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
        theirs.close()
        theirs_directly.close()
        threading.Thread(target=self._read, daemon=True).start()

    def call(self, method: str, *arguments: Any) -> Future:
        """Call a method of the child's sampler; its result or error as a future. Never waits for the child."""
        future: Future = Future()
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = future
            ended = self._ended.is_set()  # then nobody settles this call any more
        try:
            if not ended:
                with self._sending:
                    self._connection.send((number, method, arguments))
        except OSError:
            ended = True
        if ended:
            with self._lock:
                self._waiting.pop(number, None)
            fail(future, self._death())
        return future

    def close(self) -> None:
        """Stop the child and all processes that it started; may be called twice."""
        # Said, because closing this end would not reach the child while `_read` waits on it.
        with self._sending, suppress(OSError):
            self._connection.send((0, STOP, ()))
        self._ended.wait(CLOSE_SECONDS)
        self._end()
        self._connection.close()
        self.direct.close()

    def _read(self) -> None:
        """Give answers to those who wait, until the child or this process closes the pipe."""
        with suppress(EOFError, OSError):
            # The pipe alone would not do: a process that vLLM forks holds the child's end too.
            child, poll = os.pidfd_open(self.process.pid), select.poll()
            poll.register(self._connection, select.POLLIN)
            poll.register(child, select.POLLIN)
            try:
                while self._connection.fileno() in dict(poll.poll()):
                    self._settle(*self._connection.recv())
            finally:
                os.close(child)
        self._ended.set()
        self._end()  # the direct line's other end closes with it
        with self._lock:
            left, self._waiting = self._waiting, {}
        for future in left.values():
            fail(future, self._death())

    def _settle(self, number: int, succeeded: bool, value: Any) -> None:
        with self._lock:
            future = self._waiting.pop(number)
        settle(future, succeeded, value)

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
