# SPDX-License-Identifier: Apache-2.0
"""Break real runs in every way, on CPUs, and print a table of how they went on.

    python -m tests.faults [WORD ...] [--out FILE]

WORDs keep the cases whose names have all of them ("engine killed", "asynchronous"). A case takes about a minute. The
exit status is 1 if a row is bad. Needs root for the cases of full disks.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.faults.cases import CASES
from tests.faults.run import Bench, Row
from tests.helpers.tables import choose_cases, print_rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    chosen, out = choose_cases("tests.faults", str(__doc__), CASES, arguments)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        return print_rows(map(Bench(Path(folder)).run, chosen), table, out)


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| fault | next step or end after, s | restarts of engine, trainer | result | said |",
        "| --- | --: | --- | --- | --- |",
    ]
    for row in rows:
        result = f"**{row.problem}**" if row.problem else row.result
        said = row.said.replace("|", "/")[:100]
        lines.append(f"| {row.case} | {row.seconds:.0f} | {row.restarts} | {result} | {said} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
