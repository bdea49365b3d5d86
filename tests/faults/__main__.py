# SPDX-License-Identifier: Apache-2.0
"""Break real runs in every way, on CPUs, and print a table of how they went on.

    python -m tests.faults [WORD ...] [--out FILE]

WORDs keep the cases whose names have all of them ("engine killed", "asynchronous"). A case takes about a minute. The
exit status is 1 if a row is bad. Needs root for the cases of full disks.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.faults.cases import CASES
from tests.faults.run import Bench, Row


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file that gets the table too")
    parser.add_argument("--list", action="store_true", help="print the names of the cases only")
    parser.add_argument("words", nargs="*")
    given = parser.parse_args(arguments)
    chosen = [case for case in CASES if all(word in case.name for word in given.words)]
    if given.list:
        print("\n".join(case.name for case in chosen))
        return 0
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        bench = Bench(Path(folder))
        for case in chosen:
            rows.append(bench.run(case))
            print(table(rows).splitlines()[-1], flush=True)
            if given.out:
                given.out.write_text(table(rows) + "\n")
    bad = sum(bool(row.problem) for row in rows)
    print(f"{table(rows)}\n{len(rows)} rows, {bad} of them bad")
    return 1 if bad or not rows else 0


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
