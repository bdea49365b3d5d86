# SPDX-License-Identifier: Apache-2.0
"""Plot a run: reward, loss, gradient norm, entropy, length, mismatch, time per phase."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megarl.report.panels import LIMITS, LINES, SHARES, metric_names, names_with


def plot_run(
    rows: list[dict[str, Any]], file: Path, evaluated: Mapping[int, Mapping[str, float]] | None = None
) -> None:
    """Write the plot as a PNG; write nothing if there are no steps.

    Args:
        rows: rows of ``metrics.jsonl``.
        file: path of the PNG.
        evaluated: step -> ``KEY/METRIC`` -> value, with ``_low`` and ``_high``; each set has a panel.
    """
    if not rows:
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    evaluated = evaluated or {}
    sets = sorted({name.partition("/")[0] for values in evaluated.values() for name in values})
    extra = -(-len(sets) // 2)
    size = (12, 3.25 * (4 + extra))
    figure, axes = plt.subplots(4 + extra, 2, figsize=size, sharex=True, layout="constrained", squeeze=False)
    reward, *panels, phases, signal = axes.flat[:8]
    for axis, key in zip(axes.flat[8:], sets, strict=False):
        _draw_evaluated(axis, evaluated, key)
    for axis in axes.flat[8 + len(sets) :]:
        axis.axis("off")
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


def _draw_evaluated(axis: Any, evaluated: Mapping[int, Mapping[str, float]], key: str) -> None:
    """Draw the metrics of one set with their intervals."""
    names = {name for values in evaluated.values() for name in metric_names(values)}
    for name in sorted(name for name in names if name.startswith(f"{key}/")):
        steps = [step for step, values in evaluated.items() if name in values]
        values = np.array([evaluated[step][name] for step in steps])
        limits = [[evaluated[step].get(name + end, evaluated[step][name]) for step in steps] for end in LIMITS]
        errors = np.abs(np.array(limits) - values)
        label = name.removeprefix(f"{key}/")
        axis.errorbar(steps, values, errors, marker="o", markersize=3, linewidth=1, capsize=2, label=label)
    axis.set_title(f"evaluation: {key}", fontsize="medium")
    axis.set_ylabel("mean over prompts, 95% interval")
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
