"""Token sequences to verify with. NumPy only."""

from collections.abc import Sequence

import numpy as np

from megarl.types import Sample

# By dtype. In bfloat16 errors are averages over tokens, and 10% more than Hugging Face's must not be chance.
COUNT = {"float32": 10, "bfloat16": 80}
LONGEST = 40
# Of every response token in the loss.
WEIGHT = 0.05


def make_samples(count: int, vocab: int, *, seed: int = 0, longest: int = LONGEST) -> list[Sample]:
    """Random sequences of different lengths with prompt and response, and advantages of both signs."""
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


def weights_of(samples: Sequence[Sample]) -> np.ndarray:
    """``[S]`` float64 loss weights."""
    return np.full(len(samples), WEIGHT)


def distinct_samples(vocab: int, *, seed: int = 0) -> list[Sample]:
    """As many of ``make_samples`` as fit (the last one cut) with every token id at most once and never 0.

    The id then tells which sample and position a row of activations belongs to, however sequences were packed, padded
    (with 0) and split over ranks.
    """
    ids = np.random.default_rng(seed).permutation(np.arange(1, vocab))
    samples: list[Sample] = []
    for sample in make_samples(COUNT["float32"], vocab, seed=seed):
        tokens, ids = np.split(ids, [min(len(sample.tokens), len(ids))])
        if len(tokens) < 2:
            break
        samples.append(Sample(tokens, sample.response_mask[: len(tokens)], sample.advantage))
    return samples


def token_places(samples: Sequence[Sample], vocab: int) -> np.ndarray:
    """``[vocab]`` int64: the row of each token id among all tokens that are fed (all but each sample's last), or -1."""
    places: np.ndarray = np.full(vocab, -1, dtype=np.int64)
    fed = np.concatenate([sample.tokens[:-1] for sample in samples])
    places[fed] = np.arange(len(fed))
    return places
