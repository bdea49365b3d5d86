# SPDX-License-Identifier: Apache-2.0
"""Measure by how much a sync delays a request that runs."""

import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import numpy as np

from megarl.bench.syncing.trainer import SyncTrainer
from megarl.config.sections.eval import Sampling
from megarl.sampler.process import SamplerProcess

# Requests with a sync, and as many without; requests before them, which may take longer.
SYNCS, FIRST = 15, 2
# When the sync begins, of the time that a request takes.
WHEN = 0.4
# The longest that a request may take, seconds.
GENERATE_SECONDS = 120.0


def measure_pause(
    trainer: SyncTrainer,
    engine: SamplerProcess,
    vocabulary: int,
    tokens: int,
    report: Callable[[str], None],
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> float:
    """Return by how much a request takes longer if a sync of an adapter begins while it runs; medians, milliseconds.

    Requests follow each other, one with a sync and one without.

    Args:
        trainer: whose adapter is synced.
        engine: one of those that it syncs to.
        vocabulary: the size of the model's.
        tokens: that a request draws.
        report: called with what a request takes.
        clock, sleep: measure the time, and let it go by, seconds.
    """
    prompt = np.random.default_rng(1).integers(0, vocabulary, 8)
    drawn = Sampling(samples=1, temperature=1.0, top_p=1.0, max_tokens=tokens)

    def ask(meanwhile: Callable[[], Any] = lambda: None) -> float:
        """Return the seconds that a request takes; a sync that waits for its end does not count."""
        ended = SimpleQueue[float]()

        def end(_: Future[Any]) -> None:
            ended.put(clock())

        began = clock()
        request = engine.turn(prompt, 0, None, drawn)
        request.add_done_callback(end)
        meanwhile()
        request.result(GENERATE_SECONDS)
        return ended.get() - began  # whoever waits for a result may be told before `end` is

    usual = [ask() for _ in range(FIRST)][-1]

    def sync() -> None:
        sleep(WHEN * usual)
        trainer.change()
        trainer.sync()

    pairs = [(ask(), ask(sync)) for _ in range(SYNCS)]
    without, during = (statistics.median(times) * 1e3 for times in zip(*pairs, strict=True))
    report(f"adapter: requests of {tokens} tokens take {without:.1f} ms, with a sync {during:.1f}")
    return during - without
