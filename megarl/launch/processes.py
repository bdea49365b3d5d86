# SPDX-License-Identifier: Apache-2.0
"""Child processes that cannot outlive their launcher, and signals as exceptions (Linux)."""

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
    """SIGINT, SIGTERM or SIGHUP arrived. Not an ``Exception``, so that no handler for errors swallows it."""

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
    """Let a clean-up of bounded length finish, however often Ctrl-C is pressed. Outside the main thread: do nothing."""
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
    """Treat SIGTERM (Slurm, ``kill``) and SIGHUP (a terminal that is gone) like Ctrl-C, so that nothing is left behind.

    Only the first one counts: Slurm and the launcher may both send it, and the second must not cut a checkpoint short.
    A SIGHUP that is ignored (``nohup``) stays so.
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
    """Put the signal handlers back that the block replaces: ``ray.init`` installs its own for SIGTERM, which ends the
    process there and then."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = [signal.getsignal(number) for number in numbers]
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():  # elsewhere Ray replaces none
            for number, handler in zip(numbers, previous, strict=True):
                signal.signal(number, handler)


def adopt_orphans() -> None:
    """Make grandchildren whose parent dies our children, so that ``end_descendants`` finds all of them."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start(command: Sequence[str], environment: Mapping[str, str], output: Any = None) -> subprocess.Popen[bytes]:
    """Start a child in a session of its own (a Ctrl-C at the terminal reaches only us; we decide the order).

    The kernel sends it SIGTERM when we die, even by SIGKILL.

    Args:
        command: program and arguments.
        environment: its whole environment.
        output: file for stdout and stderr; None leaves them ours.
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
    # The handlers are ours, but an ignored signal would be inherited through exec.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def stop(child: subprocess.Popen[bytes], number: int, seconds: float) -> None:
    """Send a signal and wait; SIGKILL for a child that is still there after ``seconds``."""
    if child.poll() is not None:
        return
    child.send_signal(number)
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def end_descendants(seconds: float = 3.0) -> None:
    """End every process below this one: SIGTERM, then SIGKILL after ``seconds``."""
    left = psutil.Process().children(recursive=True)
    for action in (psutil.Process.terminate, psutil.Process.kill):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                action(process)
        left = psutil.wait_procs(left, timeout=seconds)[1]


class Log:
    """A child's output, kept out of sight and quoted when the child fails."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the child)

    def tail(self, lines: int = 15) -> str:
        """The last lines that were written."""
        self.file.seek(0)
        return "\n".join(self.file.read().decode(errors="replace").splitlines()[-lines:])
