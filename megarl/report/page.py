# SPDX-License-Identifier: Apache-2.0
"""Build the page of a report: curves, time, summary, settings and completions of runs. It holds no script.

Prompts and completions may hold any text. All of it is escaped, and the page's policy lets a browser run and load
nothing.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from megarl.report.charts import Line, line_chart, stacked_bars
from megarl.report.completions import LEGEND, completions
from megarl.report.panels import AGES, LINES, SHARES, STALENESS, cells, metric_names, names_with
from megarl.report.runs import RunRecord
from megarl.report.text import escaped

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1500px; padding: 0 1rem; color: #1b1b1b;
  background: #fff; }
h1 { font-size: 1.5rem } h2 { font-size: 1.2rem; border-bottom: 1px solid #ccc; margin-top: 2rem }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(420px, 1fr)); gap: 1rem }
figure { margin: 0; border: 1px solid #ddd; border-radius: 6px; padding: .6rem }
figcaption { font-weight: 600 } figure > svg { width: 100% }
.grid line { stroke: #e4e4e4 } .grid text { font-size: 11px; fill: #555 }
.legend span { margin-right: 1rem; font-size: .85rem; white-space: nowrap }
table { border-collapse: collapse } td, th { border: 1px solid #ddd; padding: .25rem .6rem; text-align: left;
  vertical-align: top; overflow-wrap: anywhere }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f6f6f6; padding: .5rem; margin: .3rem 0 }
details { margin: .5rem 0 } summary { cursor: pointer }
.note { color: #8a4b00 } .empty { color: #777 } .strip { fill: #0072b2 } .given { color: #888 }
"""


def page(runs: Sequence[RunRecord], steps: Sequence[int] = ()) -> str:
    """Return the HTML page of runs.

    Args:
        runs: at least one.
        steps: steps whose completions are shown; none for the first, a middle and the last one of each run.
    """
    title = "megarl: " + ", ".join(run.label for run in runs)
    samples = [completions(run, steps) for run in runs]  # adds to the notes
    body = [
        f"<h1>{escaped(title)}</h1>",
        _notes(runs),
        "<h2>Curves</h2>",
        f'<div class="charts">{"".join(_curves(runs))}</div>',
        "<h2>Time per phase</h2>",
        f'<div class="charts">{"".join(_times(run) for run in runs)}</div>',
        *_staleness(runs),
        "<h2>Summary</h2>",
        _summary(runs),
        "<h2>Settings that differ</h2>" if len(runs) > 1 else "<h2>Settings</h2>",
        _settings(runs),
        "<h2>Completions</h2>",
        LEGEND,
        *samples,
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
        f"<title>{escaped(title)}</title><style>{STYLE}</style></head>\n<body>{''.join(body)}</body></html>\n"
    )


def _notes(runs: Sequence[RunRecord]) -> str:
    items = [f"<li>{escaped(run.label)}: {escaped(note)}</li>" for run in runs for note in run.notes]
    return f'<ul class="note">{"".join(items)}</ul>' if items else ""


def _curves(runs: Sequence[RunRecord]) -> Iterable[str]:
    tasks = sorted({name for run in runs for name in names_with(run.rows, "task/")})
    rewards = {"reward": "reward"} | {name: name.removeprefix("task/") for name in tasks}
    yield line_chart("reward", "mean over the step", _lines(runs, rewards))
    evaluated = [values for run in runs for values in run.evaluations.values()]
    for key in sorted({name.partition("/")[0] for values in evaluated for name in values}):
        yield line_chart(f"evaluation: {key}", "mean over prompts", _evaluated(runs, key))
    for title, (names, unit) in LINES.items():
        yield line_chart(title, unit, _lines(runs, names), log=title == "mismatch")
    yield line_chart("shares", "share", _lines(runs, SHARES))


def _lines(runs: Sequence[RunRecord], names: dict[str, str]) -> list[Line]:
    """Return one line per run and metric: the run is the colour, the metric the dash; for one run, both the metric."""
    lines = []
    for place, run in enumerate(runs):
        for index, (name, label) in enumerate(names.items()):
            points = {row["step"]: row[name] for row in run.rows if name in row}
            lines.append(_line(runs, place, index, label, points))
    return lines


def _line(runs: Sequence[RunRecord], place: int, index: int, label: str, points: dict[float, float]) -> Line:
    if len(runs) == 1:
        return Line(label, points, index, index)
    return Line(f"{runs[place].label}: {label}", points, place, index)


def _evaluated(runs: Sequence[RunRecord], key: str) -> list[Line]:
    """Return the curves of one set's metrics over the evaluated versions, from step 0 on."""
    lines = []
    for place, run in enumerate(runs):
        names = {name for values in run.evaluations.values() for name in metric_names(values)}
        for index, name in enumerate(sorted(name for name in names if name.startswith(f"{key}/"))):
            points = {float(step): values[name] for step, values in run.evaluations.items() if name in values}
            lines.append(_line(runs, place, index, name.removeprefix(f"{key}/"), points))
    return lines


def _times(run: RunRecord) -> str:
    parts = {
        name.removeprefix("seconds/"): [max(0.0, row.get(name, 0.0)) for row in run.rows]
        for name in names_with(run.rows, "seconds/")
    }
    return stacked_bars(run.label, "seconds", [row["step"] for row in run.rows], parts)


def _staleness(runs: Sequence[RunRecord]) -> Iterable[str]:
    """Return the section of asynchronous runs, if there are any: age of tokens, groups, fill of the buffer."""
    stale = [run for run in runs if names_with(run.rows, "staleness_")]
    if not stale:
        return
    yield '<h2>Staleness</h2><div class="charts">'
    for title, (names, unit) in STALENESS.items():
        yield line_chart(title, unit, _lines(runs, names))
    for run in stale:
        ages = sorted(names_with(run.rows, AGES), key=lambda name: (len(name), name))
        parts = {f"{name.removeprefix(AGES)} versions": [row.get(name, 0.0) for row in run.rows] for name in ages}
        steps = [row["step"] for row in run.rows]
        yield stacked_bars(f"{run.label}: age of tokens", "share of the step's tokens", steps, parts)
    yield "</div>"


def _summary(runs: Sequence[RunRecord]) -> str:
    columns = [cells(run.summary) for run in runs]
    titles = list(dict.fromkeys(title for column in columns for title in column))
    rows = [[title, *(", ".join(column.get(title, ["-"])) for column in columns)] for title in titles]
    steps = [f"{len(run.rows)}{'' if run.summary else ' (the run has not ended)'}" for run in runs]
    return _table(["", *(run.label for run in runs)], [["steps", *steps], *rows])


def _settings(runs: Sequence[RunRecord]) -> str:
    names = list(dict.fromkeys(name for run in runs for name in run.config))
    if len(runs) > 1:
        names = [name for name in names if any(run.config.get(name) != runs[0].config.get(name) for run in runs)]
    if not names:
        return '<p class="empty">none</p>'
    rows = [[name, *(run.config.get(name, "-") for run in runs)] for name in names]
    table = _table(["setting", *(run.label for run in runs)], rows)
    return table if len(runs) > 1 else f"<details><summary>all {len(rows)} settings</summary>{table}</details>"


def _table(head: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    def line(cell: str, values: Sequence[Any]) -> str:
        return f"<tr>{''.join(f'<{cell}>{escaped(value)}</{cell}>' for value in values)}</tr>"

    return f"<table>{line('th', head)}{''.join(line('td', row) for row in rows)}</table>"
