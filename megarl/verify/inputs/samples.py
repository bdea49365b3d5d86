# SPDX-License-Identifier: Apache-2.0
"""Make token sequences to verify with. NumPy only."""

from collections.abc import Sequence

import numpy as np

from megarl.types import Sample

# Number of samples by dtype. In bfloat16 errors are averages over tokens, and enough tokens are needed that a
# difference of 10% from Hugging Face's error is not chance.
COUNT = {"float32": 10, "bfloat16": 80}
# Number of samples without ``--full``; the long one is among them.
QUICK_COUNT = {"float32": 4, "bfloat16": 80}
LONGEST = 40
# Length of one sequence, so long that an error at later positions shows.
LONG = 120
# Index of the long sequence in the batch: early, so that ``distinct_samples`` holds most of it.
LONG_PLACE = 2
# Mean loss weight of a response token. Each sequence has its own.
WEIGHT = 0.05
# Factors of the gradients of successive updates, relative to the norm at which they are clipped, so that some are
# clipped and some are not. Adam divides by the gradient's size, so clipping all of them or none would not show.
UPDATE_SCALES = (1.5, 0.4, 4.0)


def make_samples(count: int, vocab: int, *, seed: int = 0, longest: int = LONGEST) -> list[Sample]:
    """Make random sequences of different lengths with prompt and response, and advantages of both signs."""
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        prompt, response = int(rng.integers(1, longest // 2)), int(rng.integers(1, longest // 2))
        mask: np.ndarray = np.zeros(prompt + response, dtype=bool)
        mask[prompt:] = True
        if response > 4:
            mask[prompt + 2] = False  # a token the policy did not choose, in the middle
        samples.append(Sample(rng.integers(0, vocab, prompt + response), mask, advantage=float(rng.normal())))
    return samples


def verify_samples(count: int, vocab: int, *, seed: int = 0, long: int = LONG) -> list[Sample]:
    """Make ``make_samples`` with one sequence of ``long`` tokens."""
    samples = make_samples(count, vocab, seed=seed)
    rng = np.random.default_rng(seed + 1)
    mask: np.ndarray = np.arange(long) >= long // 2
    samples[LONG_PLACE] = Sample(rng.integers(0, vocab, long), mask, advantage=float(rng.normal()))
    return samples


def weights_of(samples: Sequence[Sample]) -> np.ndarray:
    """Return float64 loss weights ``[S]``, all different, so that using another sequence's weight shows."""
    return WEIGHT * np.linspace(0.4, 1.6, len(samples))


def distinct_samples(vocab: int, *, seed: int = 0, long: int = LONG) -> list[Sample]:
    """Return as many ``verify_samples`` as fit (the last one cut) with every token id at most once and never 0.

    The id then tells the sample and position that a row of activations belongs to, however sequences were packed,
    padded (with 0) and split over ranks.
    """
    ids = np.random.default_rng(seed).permutation(np.arange(1, vocab))
    samples: list[Sample] = []
    for sample in verify_samples(COUNT["float32"], vocab, seed=seed, long=long):
        tokens, ids = np.split(ids, [min(len(sample.tokens), len(ids))])
        if len(tokens) < 2:
            break
        samples.append(Sample(tokens, sample.response_mask[: len(tokens)], sample.advantage))
    return samples


def token_places(samples: Sequence[Sample], vocab: int) -> np.ndarray:
    """Map each token id to its row among all fed tokens (all but each sample's last), or -1: int64 ``[vocab]``."""
    places: np.ndarray = np.full(vocab, -1, dtype=np.int64)
    fed = np.concatenate([sample.tokens[:-1] for sample in samples])
    places[fed] = np.arange(len(fed))
    return places
