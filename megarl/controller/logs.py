# SPDX-License-Identifier: Apache-2.0
"""An actor's output goes to a file of the run folder, its children's too; and what a log says of a failure."""

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

# In the run folder.
LOGS = "logs"
# The last line of a traceback, after whatever a logger puts before it.
EXCEPTION = re.compile(r"(?:^|[\s\])])((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit))(?:: (.*))?$")
# What vLLM's front end says of a failure whose cause its engine process has printed.
SAYS_NOTHING = (
    "Engine core initialization failed",
    "EngineCore encountered an issue",
    "WorkerProc initialization failed",
)
# What Python prints between an exception and the one that it caused.
CAUSED = "The above exception was the direct cause of the following exception"
# Of a log's end, when a cause is looked for.
LOOKED_AT_BYTES = 256 * 1024


def log_file(folder: Path, name: str) -> Path:
    """The log of a participant: ``trainer-rank-0.log`` of ``trainer rank 0``."""
    return folder / f"{name.replace(' ', '-')}.log"


def redirect_output(file: Path) -> int:
    """Append everything that this process and its children print to a file.

    Args:
        file: made with its folder, on whatever node this process is.

    Returns:
        The file's size before, where this process's output begins.
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
    """Class decorator: what a public method raises is also printed, with its whole traceback."""
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
    """``root_of`` what a process has printed.

    Args:
        file: a log.
        start: byte at which the interesting part begins.

    Returns:
        None where the log is not there or holds no exception that says anything.
    """
    try:
        with file.open("rb") as handle:
            handle.seek(max(start, file.stat().st_size - LOOKED_AT_BYTES))
            return root_of(handle.read().decode(errors="replace"))
    except OSError:
        return None


def with_cause(message: str, cause: str | None) -> str:
    """A front end's message with the cause: in place of the part that says nothing, else on a line of its own."""
    if not cause or cause in message:
        return message
    for text in SAYS_NOTHING:
        if text in message:
            return message[: message.index(text)] + cause
    return f"{message}\n{cause}"


def root_of(text: str) -> str | None:
    """The exception that caused the last one of a text: ``"ValueError: Head size 16 is not supported"``.

    Args:
        text: tracebacks, with whatever a logger puts before each line, and anything else.
    """
    lines = text.splitlines()
    found = [(number, match) for number, line in enumerate(lines) if (match := EXCEPTION.search(line))]
    found = [(number, match) for number, match in found if not _says_nothing(match)]
    if not found:
        return None
    which = len(found) - 1
    while which and any(CAUSED in line for line in lines[found[which - 1][0] : found[which][0]]):
        which -= 1
    name, message = found[which][1].groups()
    name = name.rpartition(".")[2]
    return f"{name}: {message}" if message else name


def _says_nothing(match: re.Match) -> bool:
    return any(text in (match.group(2) or "") for text in SAYS_NOTHING)
