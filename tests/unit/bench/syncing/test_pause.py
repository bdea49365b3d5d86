# SPDX-License-Identifier: Apache-2.0
"""Check that the delay by syncs is theirs, and not the requests' own scatter."""

import numpy as np
import pytest

from megarl.bench.syncing.pause import delay

SYNC = 0.003


def _measured(added: float) -> float:
    """Return the delay of requests of 100 ms with some scatter, if a sync makes the one that it begins in longer."""
    rng, now = np.random.default_rng(0), 0.0
    requests, syncs = [], []
    for number in range(400):
        sync = number % 10 == 5
        length = 0.1 + 0.01 * rng.random() + added * sync
        if sync:
            syncs.append((now + 0.05, now + 0.05 + SYNC))
        requests.append((now, now + length))
        now += length
    return delay(requests, syncs)


@pytest.mark.parametrize("added", [0.0, 0.05])
def test_the_delay_is_what_the_syncs_add(added):
    assert _measured(added) == pytest.approx(added, abs=2e-3)


def test_too_few_requests_are_an_error():
    with pytest.raises(ValueError, match="3 requests are too few beside 1 syncs"):
        delay([(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)], [(0.5, 0.6)])
