# SPDX-License-Identifier: Apache-2.0
"""Spread rewards over several processes, for verifiers that compute much."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megarl.controller.rollouts.rewarding.rewards import POLL_SECONDS, RewardProcess
from megarl.controller.rollouts.rewarding.scoring import Group
from megarl.futures import results
from megarl.tasks import TaskContext
from megarl.tasks.base import Reward
from megarl.types import Prompt


class RewardPool:
    """``task.reward_processes`` processes, each with a state of its own; a prompt's completions go to one of them.

    Its methods are those of ``RewardProcess``.
    """

    def __init__(self, context: TaskContext, log: Path) -> None:
        """Start the processes, which share a log."""
        self._processes = [RewardProcess(context, log) for _ in range(context.config.reward_processes)]

    def score(self, groups: Sequence[Group], look: Callable[[], None] = lambda: None) -> list[Reward]:
        """Reward every completion, in the order given; see ``RewardProcess.score``."""
        count = len(self._processes)
        shares = [list(range(start, len(groups), count)) for start in range(count)]
        pool = ThreadPoolExecutor(count, thread_name_prefix="rewards")
        try:
            futures = [
                pool.submit(process.score, [groups[index] for index in share])
                for process, share in zip(self._processes, shares, strict=True)
            ]
            parts = results(futures, POLL_SECONDS, look)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        rewards: dict[int, list[Reward]] = {}
        for share, part in zip(shares, parts, strict=True):
            flat = iter(part)
            rewards |= {index: [next(flat) for _ in groups[index][1]] for index in share}
        return [reward for index in range(len(groups)) for reward in rewards[index]]

    def dry_run(self, prompt: Prompt, ids: Sequence[int] = (), group: int = 2) -> Reward:
        """See ``RewardProcess.dry_run``."""
        return self._processes[0].dry_run(prompt, ids, group)

    def close(self) -> None:
        """Kill the processes. Safe to call twice."""
        for process in self._processes:
            process.close()
