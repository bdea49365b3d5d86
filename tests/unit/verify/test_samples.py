# SPDX-License-Identifier: Apache-2.0
"""Check that a token's id gives its position, whatever happens to its neighbours."""

import numpy as np
import pytest

from megarl.verify.inputs.samples import LONG, distinct_samples, token_places, verify_samples


@pytest.mark.parametrize("vocab", [40, 131, 49152])
def test_every_token_is_met_once_and_padding_never(vocab):
    samples = distinct_samples(vocab)
    tokens = np.concatenate([sample.tokens for sample in samples])
    assert len(set(tokens.tolist())) == len(tokens)
    assert tokens.min() > 0
    assert tokens.max() < vocab
    assert len(samples) >= 2


def test_places_count_what_is_fed():
    samples = distinct_samples(131)
    places = token_places(samples, 131)
    fed = np.concatenate([sample.tokens[:-1] for sample in samples])
    assert places[fed].tolist() == list(range(len(fed)))
    assert (places >= 0).sum() == len(fed)
    assert all(places[sample.tokens[-1]] == -1 for sample in samples)


def test_with_a_large_vocabulary_they_are_as_long_as_the_batchs():
    lengths = [len(sample.tokens) for sample in distinct_samples(49152)]
    assert lengths == [len(sample.tokens) for sample in verify_samples(10, 49152)]
    assert max(lengths) == LONG
