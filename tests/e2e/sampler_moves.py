# SPDX-License-Identifier: Apache-2.0
"""Sync while requests run that are for no version: every token is exactly of the version that it names."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from megarl.types import Completion
from tests.e2e.sampler_rig import Rig, overlapping, prompts


def moves(rig: Rig, kind: Any = "adapter") -> dict[str, Any]:
    """Sync while requests run that are for no version: each way of ``checkpoint_engine.in_flight``."""
    results: dict[str, Any] = {}
    config = rig.sampler._requests._config
    ways = ("drain", "abort", "continue") + ("overlap",) * (kind == "adapter")
    for number, way in enumerate(ways):
        settings = config.checkpoint_engine.model_copy(update={"in_flight": way})
        rig.sampler._requests._config = replace(config, checkpoint_engine=settings)
        old = 200 + 2 * number
        results[way] = overlapping(lambda count, old=old, way=way: move(rig, kind, way, old, count), "overlapped")
    if kind == "adapter":
        results["third"] = overlapping(lambda count: third(rig, count), "overlapped")
    rig.sampler._requests._config = config
    return results


def move(rig: Rig, kind: Any, way: str, old: int, count: int) -> dict[str, Any]:
    """Sync version ``old`` + 1 while ``count`` requests draw from version ``old``."""
    new = old + 1
    rig.trainer.randomise(old)
    rig.manager.sync(old, kind)
    seeds = list(range(1000, 1000 + count))
    running = rig.start_requests(rig.sampler.sample(prompts(count, seed=old), seeds), count)
    # Some completions end under the old version; by then the others have drawn some tokens.
    while rig.sampler.gate.in_flight == count and not running.done():
        time.sleep(0.002)
    rig.trainer.randomise(new)
    syncing = ThreadPoolExecutor(1).submit(rig.manager.sync, new, kind)
    late = rig.start(rig.sampler.sample(prompts(2), [1, 2]))
    ran = not running.done()
    syncing.result(60)
    beside = not running.done()
    held = rig.call(rig.sampler.resident())[0]
    ones = [one for group in running.result(120) for one in group]
    made_by_new = sum(one.versions[-1] == new for one in ones)
    changed = sum(len(set(one.versions)) > 1 for one in ones)
    tokens = np.arange(20, 60)
    scored = rig.call(rig.sampler.score(tokens, new))
    return {
        "score_error": float(np.abs(scored - rig.trainer.logprobs(tokens[:1], tokens[1:], 1.0)).max()),
        # Some requests were still running when the new version came, and with "continue" had drawn some tokens.
        "overlapped": {
            "drain": ran,
            "overlap": beside,
            "abort": ran and made_by_new,
            "continue": ran and changed,
        }[way],
        "error": version_error(rig, ones, (old, new)),
        "made_by_new": made_by_new,
        "changed": changed,
        "whole": all(one.finish_reason == "stop" or len(one.response_ids) == 16 for one in ones),
        "late_error": version_error(rig, [one for group in late.result(60) for one in group], (old, new)),
        # The old version is dropped as soon as the workers wait for the next one.
        "held": new + 1 in held[0] and set(held[0]) <= {old + 1, new + 1} if kind == "adapter" else held[0] == [],
    }


def third(rig: Rig, count: int) -> dict[str, Any]:
    """Sync two versions while requests draw from a third; the engine has two slots, and ``in_flight`` is overlap."""
    rig.manager.sync(300, "adapter")
    running = rig.start_requests(rig.sampler.sample(prompts(count), list(range(count))), count)
    rig.manager.sync(301, "adapter")
    beside = rig.sampler.gate._in_flight[300]
    rig.manager.sync(302, "adapter")
    waited = not rig.sampler.gate._in_flight[300]
    drawn = {int(version) for group in running.result(120) for one in group for version in one.versions}
    return {"overlapped": beside > 0, "waited": waited, "drawn": sorted(drawn)}


def version_error(rig: Rig, ones: list[Completion], versions: tuple[int, int]) -> float:
    """Return the largest difference between logprobs and PEFT's, for each token of the version that made it."""
    worst = 0.0
    for version in versions:
        rig.trainer.randomise(version)
        for one in ones:
            chosen = one.versions == version
            if chosen.any():
                expected = rig.trainer.logprobs(one.prompt_ids, one.response_ids, rig.config.sampler.temperature)
                worst = max(worst, float(np.abs(expected - one.logprobs)[chosen].max()))
    return worst
