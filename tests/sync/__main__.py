# SPDX-License-Identifier: Apache-2.0
"""Run what is too long for the gate, with real vLLM engines on CPUs, and print a table.

    python -m tests.sync matrix [WORD ...]    # every layout of four Megatron ranks, transport and kind of engines
    python -m tests.sync faults [WORD ...]    # every way to break a sync, and the recovery
    python -m tests.sync soak [WORD ...]      # 200 versions into one engine: memory, files, stale keys and values

WORDs keep the rows whose names have all of them. The exit status is 1 if a row is bad.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.helpers.tables import print_rows
from tests.sync import faults, matrix, soak

# Each part has ``rows(words)`` and ``table(rows)``; a row has ``problem``, empty if it is good.
PARTS: dict[str, Any] = {"matrix": matrix, "faults": faults, "soak": soak}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.sync", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file that gets the table too")
    parser.add_argument("what", choices=list(PARTS))
    parser.add_argument("words", nargs="*")
    given = parser.parse_args(arguments)
    part = PARTS[given.what]
    return print_rows(part.rows(given.words), part.table, given.out)


if __name__ == "__main__":
    sys.exit(main())
