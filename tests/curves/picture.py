# SPDX-License-Identifier: Apache-2.0
"""Draw rewards by step: one line per staleness, the mean over seeds, with the range of the seeds."""

from pathlib import Path
from typing import Any

import numpy as np

# Rewards of a step are of 64 completions, so neighbours are averaged.
WINDOW = 3


def smooth(values: np.ndarray) -> np.ndarray:
    """Return the mean of each value and its ``WINDOW - 1`` predecessors, as far as there are any."""
    return np.array([values[max(0, end - WINDOW) : end].mean() for end in range(1, len(values) + 1)])


def draw(runs: list[dict[str, Any]], file: Path) -> None:
    """Write the picture as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for staleness in sorted({run["staleness"] for run in runs}):
        chosen = [run["rows"] for run in runs if run["staleness"] == staleness]
        steps = min(map(len, chosen))
        rewards = np.array([smooth(np.array([row["reward"] for row in rows[:steps]])) for rows in chosen])
        numbers = [row["step"] for row in chosen[0][:steps]]
        ages = [row.get("staleness_mean", 0.0) for rows in chosen for row in rows]
        label = f"max_staleness {staleness}: {np.mean(ages):.1f} versions on average, {len(chosen)} seeds"
        [line] = axis.plot(numbers, rewards.mean(axis=0), label=label)
        axis.fill_between(numbers, rewards.min(axis=0), rewards.max(axis=0), alpha=0.15, color=line.get_color())
    axis.set_xlabel("step")
    axis.set_ylabel(f"reward, mean of {WINDOW} steps")
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right")
    figure.savefig(file, dpi=110)
    plt.close(figure)
