# SPDX-License-Identifier: Apache-2.0
"""Format reports as a table, as Markdown and as JSON. Loads no torch."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from megarl.config.checks import read_model_shape
from megarl.verify.inputs.layouts import describe_refused

if TYPE_CHECKING:
    from megarl.verify.run import Report

TITLES = ("row", "worst", "error", "bound", "pass")


def table(report: "Report") -> Table:
    """Format a report as a table with one line per row."""
    case = report.place.case
    shown = Table(title=f"{case.config.model.path} at {report.place.layout}, {case.dtype}; truth in {report.truth}")
    for title in TITLES:
        shown.add_column(title, justify="right" if title in ("error", "bound") else "left", overflow="fold")
    for cells, passed in _cells(report):
        shown.add_row(*cells, style=None if passed else "bold red")
    return shown


def markdown(report: "Report") -> str:
    """Format a report as Markdown: the table, then the first differences."""
    return "\n".join([*_markdown(TITLES, [cells for cells, _ in _cells(report)]), *_below(report.differences)]) + "\n"


def _cells(report: "Report") -> list[tuple[list[str], bool]]:
    return [
        ([row.name, row.worst, f"{row.error:.1e}", f"{row.bound:.1e}", _verdict(row.passed)], row.passed)
        for row in report.rows
    ]


def matrix_markdown(
    reports: Sequence["Report"], refused: Mapping[str, Sequence[str]], settings: Sequence[str] = ()
) -> str:
    """Format one line per layout with the error of every row; below it the refused layouts with their reasons.

    The top line has each row's bound where it is the same at every layout.

    Args:
        reports: reports of the layouts.
        refused: maps each reason to the layouts that are refused for it.
        settings: settings of the command line, for the title.
    """
    case = reports[0].place.case
    family = f"{read_model_shape(case.config.model.path)['model_type']}, {case.dtype}; truth in {reports[0].truth}"
    names = [row.name for row in reports[0].rows]
    limits = [{report.rows[index].bound for report in reports} for index in range(len(names))]
    cells = [["bound", *("varies" if len(limit) > 1 else f"{min(limit):.1e}" for limit in limits), "", ""]]
    for report in reports:
        errors = [f"{row.error:.1e}" for row in report.rows]
        nearest = f"{report.worst.name}, {report.worst.severity:.0%}" if math.isfinite(report.worst.severity) else ""
        cells.append([report.place.layout, *errors, nearest, _verdict(report.passed)])
    lines = _markdown(("layout", *names, "nearest to its bound", "pass"), cells)
    below = [f"{report.place.layout}: {line}" for report in reports for line in report.differences]
    below += [f"Refused: {line}" for line in describe_refused(refused)]
    given = [", ".join(settings)] if settings else []
    title = "; ".join([f"Tiny random {family}", f"{len(reports)} layouts", *given])
    return "\n".join([f"{title}.", "", *lines, *_below(below)]) + "\n"


def as_json(reports: Sequence["Report"]) -> str:
    """Return ``{"pass", "rows": [{"name", "worst", "error", "bound", "pass"}]}`` as text; rows name their layout.

    An error that is not finite becomes null, because JSON has no such number.
    """
    rows = [
        {
            "name": row.name if len(reports) == 1 else f"{report.place.layout}: {row.name}",
            "worst": row.worst,
            "error": row.error if math.isfinite(row.error) else None,
            "bound": row.bound,
            "pass": row.passed,
        }
        for report in reports
        for row in report.rows
    ]
    return json.dumps({"pass": all(report.passed for report in reports), "rows": rows})


def _verdict(passed: bool) -> str:
    return "yes" if passed else "NO"


def _markdown(titles: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in [titles, ["---"] * len(titles), *cells]]


def _below(lines: Sequence[str]) -> list[str]:
    """Put each line into a paragraph."""
    return [text for line in lines for text in ("", line)]
