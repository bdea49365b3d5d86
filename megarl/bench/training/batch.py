# SPDX-License-Identifier: Apache-2.0
"""Make the batch that every contender gets."""

import numpy as np

from megarl.bench.training.settings import BenchSettings
from megarl.types import Sample


def loss_weights(settings: BenchSettings) -> np.ndarray:
    """Return the loss weight of each sequence ``[S]``: the mean over all response tokens."""
    return np.full(settings.batch, 1.0 / settings.response_tokens)


def make_samples(settings: BenchSettings, vocab: int) -> list[Sample]:
    """Make random sequences of equal length. A sequence feeds all its tokens but the last."""
    rng = np.random.default_rng(settings.seed)
    trained = settings.response_tokens // settings.batch
    mask = np.arange(settings.length + 1) > settings.length - trained
    return [Sample(rng.integers(0, vocab, settings.length + 1), mask, advantage=1.0) for _ in range(settings.batch)]
