# SPDX-License-Identifier: Apache-2.0
"""Compute 95% confidence intervals of means over prompts.

The prompts are the sample: completions of one prompt resemble each other, so they are one cluster (Miller 2024, "Adding
Error Bars to Evals", arXiv:2411.00640).

Shares use Wilson's interval with an effective sample size (Wilson 1927; Korn & Graubard 1998). Evaluation sets are
often small, and shares near 0 or 1: there intervals by the normal distribution or the bootstrap are too narrow, and
empty if no completion is right (Brown, Cai & DasGupta 2001; Bowyer et al. 2025, arXiv:2503.01747).

Means of other values use the percentile bootstrap over prompts (Efron & Tibshirani 1993), whose seed is fixed.
"""

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

LEVEL = 0.95
RESAMPLES, AT_ONCE = 4000, 2_000_000


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts.

    Attributes:
        value: the mean.
        low, high: its 95% confidence interval; None if there are too few prompts for one.
    """

    value: float
    low: float | None = None
    high: float | None = None

    def text(self, form: str = "{:.3f}") -> str:
        """Return ``0.412 [0.330, 0.500]``."""
        if self.low is None or self.high is None:
            return form.format(self.value)
        return f"{form.format(self.value)} [{form.format(self.low)}, {form.format(self.high)}]"


def share(values: np.ndarray, completions: int) -> Estimate:
    """Estimate the mean of values within 0 and 1 by Wilson's interval.

    The effective sample size is p (1 - p) / v with v the variance of the mean over prompts: the number of independent
    completions that would be as informative. It is at most ``completions``, and the number of prompts where all values
    are 0 or all are 1.

    Args:
        values: of each prompt, ``[P]``, P > 0.
        completions: number of completions that the values are made of.
    """
    count, mean = len(values), float(values.mean())
    spread, size = mean * (1.0 - mean), float(count)
    if count > 1 and spread > 0.0:
        variance = float(values.var(ddof=1)) / count
        size = min(spread / variance, float(completions)) if variance > 0.0 else float(completions)
    z = NormalDist().inv_cdf((1.0 + LEVEL) / 2.0)
    centre = (mean + z * z / (2.0 * size)) / (1.0 + z * z / size)
    half = z / (1.0 + z * z / size) * (spread / size + z * z / (4.0 * size * size)) ** 0.5
    return Estimate(mean, max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half)))


def average(values: np.ndarray) -> Estimate:
    """Estimate the mean of any values ``[P]``, P > 0, by the percentile bootstrap over prompts. One has no interval."""
    mean = float(values.mean())
    if len(values) < 2:
        return Estimate(mean)
    draw, means = np.random.default_rng(0), []
    rows = max(1, min(RESAMPLES, AT_ONCE // len(values)))
    for start in range(0, RESAMPLES, rows):
        chosen = draw.integers(0, len(values), (min(rows, RESAMPLES - start), len(values)))
        means.append(values[chosen].mean(axis=1))
    ends = [float(np.quantile(np.concatenate(means), (1.0 + side * LEVEL) / 2.0)) for side in (-1, 1)]
    return Estimate(mean, *ends)
