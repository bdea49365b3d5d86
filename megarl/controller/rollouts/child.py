# SPDX-License-Identifier: Apache-2.0
"""Run user code in a separate process, so that code which hangs, exits or crashes becomes an error."""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import psutil

from megarl.controller.actors.logs import redirect_output


class Child:
    """A child process that runs a module, with a pipe to it.

    Attributes:
        connection: this end of the pipe.
        log: file of the process's output.
    """

    def __init__(self, module: str, log: Path) -> None:
        """Start ``python -m module``, which calls ``run_child``."""
        self.log = log
        self.connection, theirs = Pipe()
        command = [sys.executable, "-m", module, str(theirs.fileno()), str(log)]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        theirs.close()

    def status(self) -> str:
        """Wait until the process has ended, and return how."""
        status = self._process.wait()
        return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"

    def kill(self) -> None:
        """Kill the process and its children. Safe to call twice."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self._process.pid).children(recursive=True):
                child.kill()
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Kill the process and close the pipe. Safe to call twice."""
        self.kill()
        self.connection.close()


def run_child(serve: Callable[[Connection], None]) -> None:
    """Do the work of a child: serve its connection until the other end is closed."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    redirect_output(Path(sys.argv[2]))
    # Ctrl-C on the terminal is for the controller, which then ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        serve(Connection(int(sys.argv[1])))


def portable(error: BaseException) -> BaseException:
    """Return an error that can be sent: without what it was raised from, which is printed to the log instead."""
    cause = error.__cause__
    if cause is not None:
        sys.excepthook(type(error), error, error.__traceback__)
        # Pickled with the error's attributes; tracebacks themselves are not.
        vars(error)["traceback_text"] = "".join(traceback.format_exception(cause))
    error.__cause__ = error.__context__ = None
    pickle.dumps(error)
    return error


def _end_with_parent(parent: int) -> None:
    """End this process when its parent is gone, even in the middle of user code."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
