# SPDX-License-Identifier: Apache-2.0
"""Show progress of a command that computes for minutes."""

import contextlib
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(first: str) -> Iterator[Callable[[str], None]]:
    """Show the current activity on standard error, with the seconds since the start.

    On a terminal one line is updated; elsewhere each text gets a line. Python's warnings of libraries that are imported
    inside are silenced here and in child processes, unless PYTHONWARNINGS is set.

    Args:
        first: text to show at once.
    """
    from rich.console import Console
    from rich.markup import escape

    if not sys.warnoptions:
        os.environ.setdefault("PYTHONWARNINGS", "ignore")
        warnings.simplefilter("ignore")
    console, start = Console(stderr=True), time.monotonic()

    def timed(text: str) -> str:
        return f"{time.monotonic() - start:4.0f} s  {text}"

    if not console.is_terminal:
        console.print(timed(first), markup=False, highlight=False, soft_wrap=True)
        yield lambda text: console.print(timed(text), markup=False, highlight=False, soft_wrap=True)
        return
    with console.status(escape(timed(first))) as status:
        yield lambda text: status.update(escape(timed(text)))
