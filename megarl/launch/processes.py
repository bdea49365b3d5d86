# SPDX-License-Identifier: Apache-2.0
"""Start child processes that cannot outlive their launcher, and turn signals into exceptions (Linux)."""

import contextlib
import ctypes
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


class Signalled(BaseException):
    """SIGINT, SIGTERM or SIGHUP arrived. Not an ``Exception``, so that no handler for errors catches it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def raise_on_signals() -> None:
    """Turn SIGINT, SIGTERM and SIGHUP into ``Signalled``, raised in the main thread."""

    def handler(number: int, frame: Any) -> None:
        raise Signalled(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, handler)


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """Ignore signals during a clean-up of bounded length. Does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)


@contextlib.contextmanager
def stop_on_sigterm() -> Iterator[None]:
    """Treat SIGTERM (Slurm, ``kill``) and SIGHUP (a closed terminal) like Ctrl-C, so that nothing is left behind.

    Only the first signal counts. Slurm and the launcher may both send it, and the second must not interrupt the saving
    of a checkpoint. A SIGHUP that is ignored (``nohup``) stays ignored.
    """
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)

    def interrupt(number: int, frame: Any) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt(f"signal {signal.Signals(number).name}")

    previous = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)


@contextlib.contextmanager
def handlers_kept() -> Iterator[None]:
    """Restore the signal handlers that the block replaces.

    ``ray.init`` installs its own handler for SIGTERM, which ends the process immediately.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = [signal.getsignal(number) for number in numbers]
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():  # in other threads Ray replaces no handlers
            for number, handler in zip(numbers, previous, strict=True):
                signal.signal(number, handler)


def adopt_orphans() -> None:
    """Make this process the parent of orphaned grandchildren, so that ``end_descendants`` finds all of them."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start(command: Sequence[str], environment: Mapping[str, str], output: Any = None) -> subprocess.Popen[bytes]:
    """Start a child in its own session: a Ctrl-C at the terminal reaches only the launcher, which decides the order.

    The kernel sends the child SIGTERM when the launcher dies, even by SIGKILL.

    Args:
        command: program and arguments.
        environment: the child's whole environment.
        output: file for stdout and stderr; None keeps the launcher's.
    """
    return subprocess.Popen(
        command,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )


def _die_with_parent() -> None:
    # exec resets handlers, but a child would inherit ignored signals.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def stop(child: subprocess.Popen[bytes], number: int, seconds: float) -> None:
    """Send a signal and wait. A child that is still there after ``seconds`` gets SIGKILL."""
    if child.poll() is not None:
        return
    child.send_signal(number)
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def end_descendants(seconds: float = 3.0) -> None:
    """End every descendant of this process: SIGTERM, then SIGKILL after ``seconds``."""
    remaining = psutil.Process().children(recursive=True)
    for action in (psutil.Process.terminate, psutil.Process.kill):
        for process in remaining:
            with contextlib.suppress(psutil.NoSuchProcess):
                action(process)
        remaining = psutil.wait_procs(remaining, timeout=seconds)[1]


class Log:
    """A child's output, hidden, and quoted if the child fails."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the child)

    def tail(self, lines: int = 15) -> str:
        """Return the last lines that were written."""
        self.file.seek(0)
        return "\n".join(self.file.read().decode(errors="replace").splitlines()[-lines:])
