"""What a person watches: a live table on a terminal, one line per step elsewhere."""

import time
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

# Column title -> (metric, format).
COLUMNS = {
    "step": ("step", "{:.0f}"),
    "reward": ("reward", "{:.3f}"),
    "correct": ("task/correct", "{:.2f}"),
    "loss": ("loss", "{:+.4f}"),
    "grad": ("grad_norm", "{:.3f}"),
    "entropy": ("entropy", "{:.2f}"),
    "mismatch": ("mismatch_mean", "{:.1e}"),
    "max": ("mismatch_max", "{:.1e}"),
    "tokens": ("response_tokens", "{:.1f}"),
    "sample s": ("seconds/sample", "{:.1f}"),
    "train s": ("seconds/train", "{:.1f}"),
    "sync s": ("seconds/sync", "{:.2f}"),
}
SHOWN = 12


class Screen:
    """Progress on a rich console; a context manager."""

    def __init__(self, steps: int, console: Console | None = None) -> None:
        """Prepare the display.

        Args:
            steps: of the whole run.
            console: default: standard output.
        """
        self.console = console or Console()
        self._rows: list[dict[str, Any]] = []
        self._progress = Progress(
            TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TimeRemainingColumn(), console=self.console,
        )  # fmt: skip
        self._task = self._progress.add_task("starting", total=steps)
        self._live = Live(self._render(), console=self.console, refresh_per_second=4)
        self._started = time.perf_counter()

    def __enter__(self) -> "Screen":
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.console.is_terminal:
            self._live.update(self._render(), refresh=True)
            self._live.stop()

    def phase(self, name: str) -> None:
        """Show what is being done now."""
        self._progress.update(self._task, description=name)

    def step(self, row: dict[str, Any]) -> None:
        """Show a finished step."""
        self._rows.append(row)
        self._progress.update(self._task, completed=row["step"])
        if self.console.is_terminal:
            self._live.update(self._render())
            return
        cells = [f"{title} {form.format(row[name])}" for title, (name, form) in COLUMNS.items() if name in row]
        self.console.print("  ".join(cells), highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """Print a line above the live display."""
        self.console.print(text, highlight=False, soft_wrap=True)

    def _render(self) -> Group:
        table = Table(box=None, pad_edge=False)
        columns = {t: c for t, c in COLUMNS.items() if not self._rows or c[0] in self._rows[-1]}
        for title in columns:
            table.add_column(title, justify="right")
        for row in self._rows[-SHOWN:]:
            table.add_row(*(form.format(row[name]) if name in row else "" for name, form in columns.values()))
        return Group(table, self._progress)
