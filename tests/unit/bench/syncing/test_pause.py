# SPDX-License-Identifier: Apache-2.0
"""Check that a pause is by what syncs delay the requests that run, and nothing else."""

from concurrent.futures import Future

import numpy as np
import pytest

from megarl.bench.syncing.pause import FIRST, SYNCS, WHEN, measure_pause


class World:
    """Trainer, engine and clock. A request of 100 ms takes longer by ``added`` if a sync begins while it runs.

    As with ``in_flight: drain``, a sync ends after the request.
    """

    def __init__(self, added: float) -> None:
        self.now, self.added = 0.0, added
        self.request: Future | None = None
        self.end, self.asked, self.synced_at = 0.0, 0, []

    def clock(self) -> float:
        return self.now

    def turn(self, prompt, seed, version, sampling) -> Future:
        assert (len(prompt), sampling.samples, sampling.max_tokens) == (8, 1, 64)
        self.asked += 1
        scatter = np.random.default_rng(self.asked).normal(0, 0.001)
        slow = 5.0 if self.asked < FIRST else 0.0  # the engine compiles
        self.request, self.began, self.end = _Asked(self), self.now, self.now + 0.1 + scatter + slow
        return self.request

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def change(self) -> None:
        assert self.request and not self.request.done()

    def sync(self) -> None:
        self.synced_at.append(self.now - self.began)
        self.end += self.added
        self.request.pass_by()
        self.now += 3.0  # the rest of the sync is not the request's


class _Asked(Future):
    """A request, which has ended once somebody has waited for it."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def pass_by(self) -> None:
        if not self.done():
            self.world.now = max(self.world.now, self.world.end)
            self.set_result(None)

    def result(self, timeout=None):
        self.pass_by()
        return super().result(timeout)


@pytest.mark.parametrize("added", [0.0, 0.004])
def test_a_pause_is_what_a_sync_adds(added):
    world, lines = World(added), []
    found = measure_pause(world, world, 100, 64, lines.append, clock=world.clock, sleep=world.sleep)
    assert found == pytest.approx(added * 1e3, abs=0.6)
    assert len(world.synced_at) == SYNCS and world.asked == FIRST + 2 * SYNCS
    assert world.synced_at == pytest.approx([WHEN * 0.1] * SYNCS, rel=0.05)
    assert lines[0].startswith("adapter: requests of 64 tokens take 100.")
