"""One picture of a run: reward, mismatch, time per phase."""

from pathlib import Path
from typing import Any

import numpy as np


def plot_run(rows: list[dict[str, Any]], file: Path) -> None:
    """Write a PNG; nothing where there are no steps.

    Args:
        rows: of ``metrics.jsonl``.
        file: the PNG.
    """
    if not rows:
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = np.array([row["step"] for row in rows])
    figure, (reward, mismatch, phases) = plt.subplots(3, 1, figsize=(8, 9), sharex=True, layout="constrained")
    reward.plot(steps, [row["reward"] for row in rows], marker="o", markersize=3, label="reward")
    for name in sorted({name for row in rows for name in row if name.startswith("task/")}):
        reward.plot(steps, [row.get(name, np.nan) for row in rows], linewidth=1, label=name.removeprefix("task/"))
    reward.set_ylabel("mean over the step")
    reward.legend(loc="best", frameon=False)
    mismatch.semilogy(steps, [row["mismatch_mean"] for row in rows], marker="o", markersize=3, label="mean")
    mismatch.semilogy(steps, [row["mismatch_max"] for row in rows], linewidth=1, label="max")
    mismatch.set_ylabel("|sampler - trainer| logprob (nats)")
    mismatch.legend(loc="best", frameon=False)
    bottom = np.zeros(len(rows))
    for name in sorted({name for row in rows for name in row if name.startswith("seconds/")}):
        values = np.array([row.get(name, 0.0) for row in rows])
        phases.bar(steps, values, bottom=bottom, label=name.removeprefix("seconds/"))
        bottom += values
    phases.set_ylabel("seconds")
    phases.set_xlabel("step")
    phases.legend(loc="best", frameon=False)
    figure.suptitle(file.parent.name)
    figure.savefig(file, dpi=120)
    plt.close(figure)
