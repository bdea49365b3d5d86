# SPDX-License-Identifier: Apache-2.0
"""Send the prompts of a reproducible batch in several orders, as Ray does when it turns calls round."""

import asyncio
import dataclasses
from typing import Any

import numpy as np

from megarl.types import Completion
from tests.e2e.sampler_rig import Rig

COUNT = 4
# Tokens that all prompts begin with. Whichever comes first computes them for the others.
SHARED = 40


def orders(rig: Rig, version: int) -> dict[str, Any]:
    """Count completions that depend on the order in which an engine gets the prompts, with and without the setting."""
    lists = [list(range(COUNT)), list(reversed(range(COUNT))), np.random.default_rng(0).permutation(COUNT).tolist()]
    changed = {}
    kept = rig.sampler._requests._config
    for reproducible in (True, False):
        sampler = kept.sampler.model_copy(update={"reproducible": reproducible})
        rig.sampler._requests._config = dataclasses.replace(kept, sampler=sampler)
        first, *others = [rig.call(_draw(rig, version, order)) for order in lists]
        changed[reproducible] = sum(_differ(first, other) for other in others)
    rig.sampler._requests._config = kept
    return changed


async def _draw(rig: Rig, version: int, order: list[int]) -> list[list[Completion]]:
    """Return the completions in the order of the prompts, which the engine gets in ``order``."""
    sampler, shared = rig.sampler, np.arange(20, 20 + SHARED)
    assert await sampler._link.engine().reset_prefix_cache()
    await sampler.batching.hold()
    calls = {}
    for index in order:
        prompt = np.append(shared, np.arange(100, 103 + 5 * index))
        calls[index] = asyncio.ensure_future(sampler.generate([prompt], version, [1000 + index]))
        await asyncio.sleep(0.01)  # so that it arrives before the next one
    await sampler.batching.release(COUNT * rig.config.sampler.samples_per_prompt)
    return [(await calls[index])[0] for index in range(COUNT)]


def _differ(left: list[list[Completion]], right: list[list[Completion]]) -> int:
    """Count the completions whose tokens or logprobs are not the same bit by bit."""
    return sum(
        a.response_ids.tobytes() != b.response_ids.tobytes() or a.logprobs.tobytes() != b.logprobs.tobytes()
        for one, other in zip(left, right, strict=True)
        for a, b in zip(one, other, strict=True)
    )
