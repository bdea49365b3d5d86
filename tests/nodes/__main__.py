# SPDX-License-Identifier: Apache-2.0
"""Run megarl over two machines that Linux makes of this one, break them, and print a table of how the runs went on.

    python -m tests.nodes [WORD ...] [--out FILE]

The machines have networks, host names, /dev/shm and /tmp of their own; they share the rest of the disk. WORDs keep the
cases whose names have all of them ("engine's node", "sbatch"). A case takes two minutes. The exit status is 1 if a row
is bad. Needs root.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.helpers.tables import choose_cases, print_rows
from tests.nodes.cases import CASES
from tests.nodes.machines import two_machines
from tests.nodes.run import Bench, Row


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    chosen, out = choose_cases("tests.nodes", str(__doc__), CASES, arguments)
    # Not below /tmp, which the machines do not share.
    with tempfile.TemporaryDirectory(prefix="nodes-", dir="/var/tmp") as folder, two_machines() as machines:
        return print_rows(map(Bench(Path(folder), machines).run, chosen), table, out)


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| run | next step or end after, s | longest silence, s | restarts of engine, trainer | result | said |",
        "| --- | --: | --: | --- | --- | --- |",
    ]
    for row in rows:
        result = f"**{row.problem}**" if row.problem else "good"
        said = row.said.replace("|", "/")[:110]
        lines.append(f"| {row.case} | {row.seconds:.0f} | {row.silence:.0f} | {row.restarts} | {result} | {said} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
