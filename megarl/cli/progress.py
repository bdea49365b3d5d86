# SPDX-License-Identifier: Apache-2.0
"""Progress of a command that computes for minutes."""

import contextlib
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(first: str) -> Iterator[Callable[[str], None]]:
    """Show on standard error what is being done, with the seconds since the start.

    On a terminal one line changes, elsewhere each text has a line. Python's warnings, of the libraries that are
    imported inside, are silenced here and in child processes unless PYTHONWARNINGS is set.

    Args:
        first: shown at once.
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
