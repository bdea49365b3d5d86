# SPDX-License-Identifier: Apache-2.0
"""Adjust the scores of truncated completions before training (``loss.truncated``)."""

from collections.abc import Sequence

import numpy as np

from megarl.config import LossConfig
from megarl.types import Trajectory


def trained_scores(
    scores: np.ndarray, trajectories: Sequence[Trajectory], config: LossConfig, max_tokens: int
) -> np.ndarray:
    """Scores of a group as the advantages see them.

    ``penalise`` is DAPO's soft overlong punishment (arXiv:2503.14476, equation 13) times ``overlong_penalty``: with
    L the limit and C ``overlong_tokens``, a response of n tokens gets 0 for n <= L - C, else ((L - C) - n) / C, which
    is -1 at the limit.

    Args:
        scores: ``[G]`` the task's rewards.
        trajectories: G.
        config: ``truncated``, ``overlong_tokens`` and ``overlong_penalty`` are used.
        max_tokens: ``sampler.max_response_tokens``.

    Returns:
        ``[G]``; ``scores`` itself with ``keep`` and ``mask``.
    """
    if config.truncated in ("keep", "mask"):
        return scores
    if config.truncated == "zero":
        return np.where([one.is_truncated for one in trajectories], 0.0, scores)
    lengths = np.array([one.drawn_tokens for one in trajectories], dtype=np.float64)
    free = max_tokens - config.overlong_tokens
    return scores + config.overlong_penalty * np.minimum(0.0, (free - lengths) / config.overlong_tokens)
