# SPDX-License-Identifier: Apache-2.0
"""Plot a run: reward, loss, gradient norm, entropy, length, mismatch, time per phase."""

from pathlib import Path
from typing import Any

import numpy as np

from megarl.report.panels import LINES, SHARES, names_with


def plot_run(rows: list[dict[str, Any]], file: Path) -> None:
    """Write the plot as a PNG; write nothing if there are no steps.

    Args:
        rows: rows of ``metrics.jsonl``.
        file: path of the PNG.
    """
    if not rows:
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(4, 2, figsize=(12, 13), sharex=True, layout="constrained")
    reward, *panels, phases, signal = axes.flat
    tasks = {name: name.removeprefix("task/") for name in names_with(rows, "task/")}
    _draw(reward, rows, {"reward": "reward"} | tasks, "reward", "mean over the step")
    for panel, (title, (lines, unit)) in zip(panels, LINES.items(), strict=True):
        _draw(panel, rows, lines, title, unit)
    panels[-1].set_yscale("log")
    _draw(signal, rows, SHARES, "shares", "share")
    signal.set_ylim(-0.05, 1.05)
    _stack(phases, rows)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    figure.suptitle(file.parent.name)
    figure.savefig(file, dpi=100)
    plt.close(figure)


def _draw(axis: Any, rows: list[dict[str, Any]], lines: dict[str, str], title: str, unit: str) -> None:
    """Draw one line per metric; steps that lack the metric are gaps."""
    steps = [row["step"] for row in rows]
    for name, label in lines.items():
        axis.plot(steps, [row.get(name, np.nan) for row in rows], marker="o", markersize=3, linewidth=1, label=label)
    axis.set_title(title, fontsize="medium")
    axis.set_ylabel(unit)
    axis.legend(loc="best", frameon=False)


def _stack(axis: Any, rows: list[dict[str, Any]]) -> None:
    """Draw the seconds of each phase as stacked bars."""
    bottom = np.zeros(len(rows))
    for name in names_with(rows, "seconds/"):
        values = np.array([row.get(name, 0.0) for row in rows])
        axis.bar([row["step"] for row in rows], values, bottom=bottom, label=name.removeprefix("seconds/"))
        bottom += values
    axis.set_title("time per phase", fontsize="medium")
    axis.set_ylabel("seconds")
    axis.legend(loc="best", frameon=False)
