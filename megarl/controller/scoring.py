# SPDX-License-Identifier: Apache-2.0
"""Compute the rewards of completions in threads, and check them."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from megarl.errors import RewardError
from megarl.tasks.base import Reward, Task
from megarl.types import LARGEST_REWARD, Prompt


def score_all(task: Task, pairs: Sequence[tuple[Prompt, str]], threads: int) -> list[Reward]:
    """Reward every completion, in the order given.

    Threads help with rewards that wait (for a judge, a sandbox, a file) or that release the GIL.

    Args:
        task: computes the rewards; called from several threads at once.
        pairs: pairs of prompt and decoded response.
        threads: number of threads; 1 means the calling thread.

    Raises:
        RewardError: the task raised it, or a score or metric is not finite or beyond +-1e38.
    """

    def reward_of(pair: tuple[Prompt, str]) -> Reward:
        return check(task.reward(*pair), pair[0])

    if threads == 1:
        return [reward_of(pair) for pair in pairs]
    pool = ThreadPoolExecutor(min(threads, max(len(pairs), 1)), thread_name_prefix="reward")
    try:
        return list(pool.map(reward_of, pairs))
    finally:
        # After an error: cancel rewards that have not begun, and do not wait for those that are running.
        pool.shutdown(wait=False, cancel_futures=True)


def check(reward: Reward, prompt: Prompt) -> Reward:
    """Return the reward. Raise ``RewardError`` if means over a step, or float32, could not hold it."""
    for label, value in (("score", reward.score), *((f"metric '{name}'", x) for name, x in reward.metrics.items())):
        if not abs(value) <= LARGEST_REWARD:
            raise RewardError(
                f"prompt '{prompt.id}': the reward's {label} is {value}; it must be finite and within "
                f"+-{LARGEST_REWARD:g}"
            )
    return reward
