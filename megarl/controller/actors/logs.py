# SPDX-License-Identifier: Apache-2.0
"""Redirect the output of an actor and its children to a log file, and find the cause of a failure in a log."""

import asyncio
import faulthandler
import functools
import inspect
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The last line of a traceback, after the prefix that a logger may put before it.
EXCEPTION = re.compile(r"(?:^|[\s\])])((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit))(?:: (.*))?$")
# Messages of vLLM's front end about a failure whose cause only its engine process has printed.
SAYS_NOTHING = (
    "Engine core initialization failed",
    "EngineCore encountered an issue",
    "WorkerProc initialization failed",
)
# Part of vLLM's start -> its line in the log (0.26, 0.32). ``init`` holds the two after it.
PARTS = {
    "weights": re.compile(r"Model loading took .* and ([\d.]+) seconds"),
    "init": re.compile(r"init engine \(.*\) took ([\d.]+) s"),
    "compilation": re.compile(r"\(compilation: ([\d.]+) s"),
    "graphs": re.compile(r"Graph capturing finished in ([\d.]+) secs"),
}
# Python prints this between an exception and the one that it caused.
CAUSED = "The above exception was the direct cause of the following exception"
# Bytes at the end of a log to search for a cause.
LOOKED_AT_BYTES = 256 * 1024


def log_file(folder: Path, name: str) -> Path:
    """Return the log file of a participant: ``trainer-rank-0.log`` for ``trainer rank 0``."""
    return folder / f"{name.replace(' ', '-')}.log"


def redirect_output(file: Path) -> int:
    """Append everything that this process and its children print to a file.

    Args:
        file: the log; it and its folder are created on this process's node.

    Returns:
        The file's size before, which is where this process's output begins.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    size = os.fstat(descriptor).st_size
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    faulthandler.enable(sys.stderr)
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
    print(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} process {os.getpid()}", flush=True)
    return size


def logs_exceptions(actor: type) -> type:
    """Class decorator: print the whole traceback of what a public method raises."""
    for name, method in list(vars(actor).items()):
        if inspect.isfunction(method) and not name.startswith("_"):
            setattr(actor, name, _printing(method))
    return actor


def _printing(method: Callable) -> Callable:
    if asyncio.iscoroutinefunction(method):

        @functools.wraps(method)
        async def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return await method(*args, **kwargs)
            except Exception:
                traceback.print_exc()
                raise
    else:

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except Exception:
                traceback.print_exc()
                raise

    return call


def root_exception(file: Path, start: int = 0) -> str | None:
    """Return ``root_of`` the output of a process.

    Args:
        file: the log of the process.
        start: byte from which to search.

    Returns:
        None if there is no log, or it holds no exception that names a cause.
    """
    try:
        with file.open("rb") as handle:
            handle.seek(max(start, file.stat().st_size - LOOKED_AT_BYTES))
            return root_of(handle.read().decode(errors="replace"))
    except OSError:
        return None


def parts_of_start(file: Path, start: int = 0) -> dict[str, float]:
    """Return the seconds of the parts of vLLM's start that its log tells, none if there is no log.

    Args:
        file, start: as for ``root_exception``.
    """
    try:
        with file.open("rb") as handle:
            handle.seek(start)
            text = handle.read().decode(errors="replace")
    except OSError:
        return {}
    found = {name: pattern.search(text) for name, pattern in PARTS.items()}
    return {name: float(match[1]) for name, match in found.items() if match}


def with_cause(message: str, cause: str | None) -> str:
    """Replace the uninformative part of a front end's message by the cause, or append the cause as a line."""
    if not cause or cause in message:
        return message
    for text in SAYS_NOTHING:
        if text in message:
            return message[: message.index(text)] + cause
    return f"{message}\n{cause}"


def root_of(text: str) -> str | None:
    """Return the exception that caused the last one in a text: ``"ValueError: Head size 16 is not supported"``.

    Args:
        text: log text with tracebacks; its lines may have a logger's prefix.
    """
    lines = text.splitlines()
    exceptions = [(number, match) for number, line in enumerate(lines) if (match := EXCEPTION.search(line))]
    exceptions = [(number, match) for number, match in exceptions if not _says_nothing(match)]
    if not exceptions:
        return None
    root = len(exceptions) - 1
    while root and any(CAUSED in line for line in lines[exceptions[root - 1][0] : exceptions[root][0]]):
        root -= 1
    name, message = exceptions[root][1].groups()
    name = name.rpartition(".")[2]
    return f"{name}: {message}" if message else name


def _says_nothing(match: re.Match) -> bool:
    return any(text in (match.group(2) or "") for text in SAYS_NOTHING)
