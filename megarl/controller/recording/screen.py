# SPDX-License-Identifier: Apache-2.0
"""Show the progress of a run: the metrics of every step, one of its completions, and the current phase."""

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from megarl.controller.recording.start_times import StartTimes
from megarl.evaluation.results import SetResult
from megarl.report.panels import SIZES, cells

# Column title -> (metric, format, width).
COLUMNS = {
    "step": ("step", "{:.0f}", 5),
    "reward": ("reward", "{:.3f}", 6),
    "correct": ("task/correct", "{:.2f}", 7),
    "no signal": ("groups_without_signal", "{:.2f}", 9),
    "loss": ("loss", "{:+.4f}", 8),
    "grad": ("grad_norm", "{:.3f}", 6),
    "entropy": ("entropy", "{:.2f}", 7),
    "tokens": ("response_tokens", "{:.1f}", 6),
    "mismatch": ("mismatch_mean", "{:.1e}", 8),
    "max": ("mismatch_max", "{:.1e}", 7),
    "sample s": ("seconds/sample", "{:.1f}", 8),
    "train s": ("seconds/train", "{:.1f}", 7),
    "sync s": ("seconds/sync", "{:.2f}", 6),
}
# Number of rows between two headers on a terminal.
HEADER_EVERY = 20
# Without a terminal: after a phase was shown once, at least this many seconds pass before it is shown again.
QUIET_SECONDS = 30.0


class Screen:
    """Shows progress on a rich console; a context manager.

    On a terminal, rows scroll above one line of progress. Elsewhere (a pipe, a log) each phase is printed the first
    time, and later only if nothing was printed for ``QUIET_SECONDS``.
    """

    def __init__(self, steps: int, console: Console | None = None, start: StartTimes | None = None) -> None:
        """Prepare the display.

        Args:
            steps: steps of the whole run.
            console: the console; default: standard output.
            start: takes the time of the start-up, which is printed when it ends.
        """
        self.start = start
        self.console = console or Console()
        self._progress = Progress(
            TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TimeRemainingColumn(), console=self.console,
        )  # fmt: skip
        self._task = self._progress.add_task("starting", total=steps)
        self._live = Live(self._progress, console=self.console, refresh_per_second=4)
        self._started = self._printed = time.monotonic()
        self._phases: set[str] = set()
        self._shown = 0

    def __enter__(self) -> "Screen":
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.console.is_terminal:
            self._live.update(self._progress, refresh=True)
            self._live.stop()

    def phase(self, name: str) -> None:
        """Show the current phase."""
        if self.start and (table := self.start.phase(name)):
            self.say(table)
        self._progress.update(self._task, description=name)
        now = time.monotonic()
        if not self.console.is_terminal and (name not in self._phases or now - self._printed >= QUIET_SECONDS):
            self.say(f"{now - self._started:6.1f} s  {name}")
        self._phases.add(name)

    def step(self, row: Mapping[str, Any]) -> None:
        """Show a finished step."""
        self._progress.update(self._task, completed=row["step"])
        if not self.console.is_terminal:
            cells = [f"{title} {form.format(row[name])}" for title, (name, form, _) in COLUMNS.items() if name in row]
            self.say("  ".join(cells))
            return
        columns = self._fitting(row)
        if self._shown % HEADER_EVERY == 0:
            self.say(" ".join(title.rjust(width) for title, (_, _, width) in columns.items()), style="bold")
        self._shown += 1
        self.say(" ".join(form.format(row[name]).rjust(width) for name, form, width in columns.values()))

    def _fitting(self, row: Mapping[str, Any]) -> dict[str, tuple[str, str, int]]:
        """Return the columns that the row has and that fit the terminal, from the left."""
        columns, used = {}, 0
        for title, column in COLUMNS.items():
            if column[0] not in row:
                continue
            used += column[2] + 1
            if used <= self.console.width + 1:  # the last column needs no space after it
                columns[title] = column
        return columns

    def completion(self, prompt: str, text: str, reward: float) -> None:
        """Show one completion of the step on one line, shortened to fit."""
        room = max(40, (self.console.width if self.console.is_terminal else 160) - 26)
        parts = shorten(prompt, room // 2), shorten(text, room // 2)
        self.say(f"      {parts[0]!r} -> {parts[1]!r} ({reward:.3g})", style="dim")

    def evaluation(self, step: int, results: Mapping[str, SetResult]) -> None:
        """Show an evaluation, one line for each set."""
        for key, result in results.items():
            sampling = result.measured.sampling
            shown = ", ".join(
                f"{name} {estimate.text()}" for name, estimate in result.estimates.items() if name not in SIZES
            )
            size = f"{len(result.measured.prompts)} prompts x {sampling.samples}"
            self.say(f"evaluation '{key}' after step {step} ({size}): {shown}", style="bold")

    def say(self, text: str, style: str | None = None) -> None:
        """Print lines above the live display."""
        self._printed = time.monotonic()
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def summary(self, summary: Mapping[str, Any]) -> None:
        """Print a run's summary as a table."""
        self.console.print(summary_table(summary))


def shorten(text: str, most: int) -> str:
    """Return a text as one line of at most ``most`` characters; the middle of a longer one is left out."""
    line = " ".join(text.split())
    kept = (most - 3) // 2
    return line if len(line) <= most else f"{line[:kept]}...{line[-kept:]}"


def summary_table(summary: Mapping[str, Any]) -> Table:
    """Build a table of the main numbers of ``summary.json``, one row each. A missing number has no row."""
    table = Table(title=f"{summary['steps']} steps", title_justify="left", show_header=False, pad_edge=False, box=None)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    for title, values in cells(summary).items():
        table.add_row(title, *values)
    return table
