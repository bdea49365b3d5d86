# SPDX-License-Identifier: Apache-2.0
"""Measure by how much syncs delay requests that run."""

import statistics
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from megarl.bench.syncing.trainer import SyncTrainer
from megarl.config.sections.eval import Sampling
from megarl.sampler.process import SamplerProcess

# Syncs while requests run; the seconds before each, and the requests that must fit in.
SYNCS, REST_SECONDS, RESTING = 15, 0.8, 8
# The longest that a request may take, seconds.
GENERATE_SECONDS = 120.0

# Begin and end, in seconds.
Span = tuple[float, float]


def measure_pause(
    trainer: SyncTrainer, engine: SamplerProcess, vocabulary: int, report: Callable[[str], None]
) -> float:
    """Return the ``delay`` of requests of one token, which follow each other, by syncs of an adapter; milliseconds."""
    prompt = np.random.default_rng(1).integers(0, vocabulary, 8)
    one = Sampling(samples=1, temperature=1.0, top_p=1.0, max_tokens=1)
    requests: list[Span] = []
    syncs: list[Span] = []
    enough = threading.Event()

    def ask() -> None:
        began = time.perf_counter()
        engine.turn(prompt, len(requests), None, one).result(GENERATE_SECONDS)
        requests.append((began, time.perf_counter()))

    def keep_asking() -> None:
        while not enough.is_set():
            ask()

    for _ in range(2):  # the first may take longer
        ask()
    rest = max(REST_SECONDS, RESTING * (requests[-1][1] - requests[-1][0]))
    asking = threading.Thread(target=keep_asking)
    asking.start()
    for _ in range(SYNCS):
        time.sleep(rest)
        trainer.change()
        began = time.perf_counter()
        trainer.sync()
        syncs.append((began, time.perf_counter()))
    time.sleep(rest)
    enough.set()
    asking.join()
    usual = statistics.median(end - start for start, end in requests)
    report(f"adapter: {len(requests)} requests of {usual * 1e3:.1f} ms, {len(syncs)} syncs")
    return delay(requests, syncs) * 1e3


def delay(requests: Sequence[Span], syncs: Sequence[Span]) -> float:
    """Return by how long syncs delay requests: medians of the longest one that each sync hits, with and without a sync.

    A sync hits the requests that run during it or begin less than a request later. The longest of three is longer than
    most, so it is compared with the longest of as many that follow each other and that no sync hits.

    Args:
        requests: one after the other.
        syncs: those during them.

    Returns:
        Seconds; negative if the requests scatter by more than the delay.

    Raises:
        ValueError: too few requests ran beside the syncs.
    """
    times = [end - start for start, end in requests]
    usual = statistics.median(times)
    hit = [[i for i, (start, end) in enumerate(requests) if end > a and start < b + usual] for a, b in syncs]
    size, touched = round(statistics.median(map(len, hit))), {i for one in hit for i in one}
    beside = [range(i, i + size) for i in range(len(times) - size + 1) if touched.isdisjoint(range(i, i + size))]
    if not beside or not size:
        raise ValueError(f"{len(requests)} requests are too few beside {len(syncs)} syncs")
    during, without = (statistics.median(max(times[i] for i in one) for one in part if one) for part in (hit, beside))
    return during - without
