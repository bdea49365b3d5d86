# SPDX-License-Identifier: Apache-2.0
"""Choose cases and print their rows as they come, for suites that are commands of their own."""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any


def choose_cases(
    module: str, description: str, cases: Sequence[Any], arguments: Sequence[str] | None
) -> tuple[list[Any], Path | None]:
    """Parse ``[WORD ...] [--out FILE] [--list]``; return the cases whose names have all words, and the file.

    With ``--list`` the names are printed, and the command ends.

    Args:
        module: the command's module.
        description: its documentation.
        cases: each has ``name``.
        arguments: of the command line; None: this process's.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file that gets the table too")
    parser.add_argument("--list", action="store_true", help="print the names of the cases only")
    parser.add_argument("words", nargs="*")
    given = parser.parse_args(arguments)
    chosen = [case for case in cases if all(word in case.name for word in given.words)]
    if given.list:
        print("\n".join(case.name for case in chosen))
        sys.exit()
    return chosen, given.out


def print_rows(rows: Iterable[Any], table: Callable[[Sequence[Any]], str], out: Path | None) -> int:
    """Print each row when it is there, and the table at the end; return the exit status, 1 if a row is bad.

    Args:
        rows: each has ``problem``, empty if the row is good.
        table: formats rows as Markdown, one line each.
        out: file that gets the table so far after each row; or None.
    """
    seen, text = list[Any](), ""
    for row in rows:
        seen.append(row)
        text = table(seen)
        print(text.splitlines()[-1], flush=True)
        if out:
            out.write_text(text + "\n")
    bad = sum(bool(row.problem) for row in seen)
    print(f"{text}\n{len(seen)} rows, {bad} of them bad")
    return 1 if bad or not seen else 0
