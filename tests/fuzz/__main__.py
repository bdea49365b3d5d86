# SPDX-License-Identifier: Apache-2.0
"""Run fuzz cases: ``python -m tests.fuzz [TARGET ...] [--cases 2000] [--seed 0] [--case N] [--keep FOLDER]``."""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.fuzz.harness import Outcome, run_cases, summary
from tests.fuzz.targets import TARGETS
from tests.helpers.ranks import run_ranks


def main() -> int:
    """Run the cases of each target in a process of its own; return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"default: all of {', '.join(TARGETS)}")
    parser.add_argument("--cases", type=int, default=2000, help="of each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="run this one alone")
    parser.add_argument("--keep", type=Path, help="a new folder for the subjects of failed cases")
    parser.add_argument("--show", action="store_true", help="print every outcome")
    arguments = parser.parse_args()
    if unknown := set(arguments.targets) - set(TARGETS):
        parser.error(f"unknown target {sorted(unknown)[0]} (known: {', '.join(TARGETS)})")
    numbers = range(arguments.cases) if arguments.case is None else [arguments.case]
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="megarl-fuzz-") as temporary:
        for name in arguments.targets or TARGETS:
            work = (arguments.keep or Path(temporary)) / name
            # In a rank, because some targets build a model.
            outcomes += run_ranks(run_cases, 1, name, arguments.seed, numbers, str(work), bool(arguments.keep))[0]
    for outcome in outcomes:
        if outcome.failed or arguments.show:
            print(outcome)
    print(summary(outcomes))
    return int(any(outcome.failed for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
