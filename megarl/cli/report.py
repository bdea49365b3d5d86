# SPDX-License-Identifier: Apache-2.0
"""Write runs as one HTML page (`megarl report`)."""

import argparse
from pathlib import Path

from megarl.errors import ConfigError

DEFAULT = "report.html"


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add `report` to the command line."""
    parser = commands.add_parser(
        "report",
        help="write runs as one HTML page",
        description="Write curves, time per phase, summary, settings and completions of runs as one HTML page that "
        "loads nothing; prints its path.",
    )
    parser.add_argument("sources", metavar="RUN", nargs="+", help="run folder")
    parser.add_argument(
        "--out", dest="file", metavar="FILE", help=f"the page (default: RUN/{DEFAULT}; of several runs, ./{DEFAULT})"
    )
    parser.add_argument(
        "--steps", default="", metavar="N[,N]", help="steps whose completions are shown (default: three of each run)"
    )
    parser.set_defaults(run=report)


def report(arguments: argparse.Namespace) -> None:
    """Write the page that the command line asks for.

    Raises:
        ConfigError: a source is not a run folder, or an option is wrong.
        CheckpointError: the page cannot be written.
    """
    from megarl.files import user_path, write_text, writing
    from megarl.report.page import page
    from megarl.report.runs import read_runs

    steps = _steps(arguments.steps)
    runs = read_runs(arguments.sources)
    file = Path(DEFAULT) if len(runs) > 1 else runs[0].folder / DEFAULT
    if arguments.file is not None:
        file = user_path("--out", arguments.file)
        if file.is_dir() or not file.parent.is_dir():
            problem = "is a folder" if file.is_dir() else f"is in '{file.parent}', which is not a folder"
            raise ConfigError(f"--out is '{arguments.file}', which {problem}; name a file such as {DEFAULT}")
    with writing(file):
        write_text(file, page(runs, steps))
    for run in runs:
        for note in run.notes:
            print(f"{run.label}: {note}")
    print(file)


def _steps(text: str) -> list[int]:
    """Return the steps of ``--steps``."""
    parts = text.split(",") if text else []
    if bad := [part for part in parts if not (part.isascii() and part.isdigit() and len(part) < 10)]:
        raise ConfigError(f"--steps is '{text}', of which '{bad[0]}' is not a step; write it as 1,10,20")
    return sorted({int(part) for part in parts})
