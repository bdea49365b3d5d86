# SPDX-License-Identifier: Apache-2.0
"""Compute the rewards of completions, in threads or in one event loop, and check them."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

from megarl.errors import MegarlError, RewardError
from megarl.tasks.base import Reward, Task
from megarl.tasks.rewards.forms import form_of_task, one_for_each
from megarl.types import LARGEST_REWARD, DecodedCompletion, Prompt

# A prompt and its completions.
Group = tuple[Prompt, Sequence[DecodedCompletion]]

# Told of each call: ("begin", place, prompt's id), ("end", place, rewards), ("failed", place, error). The place of a
# call is the index of its group and those of its completions.
Place = tuple[int, tuple[int, ...]]
Report = Callable[[tuple], None]

# Cancelled async rewards get so long to clean up after another one failed.
CANCEL_SECONDS = 1.0


class Call(NamedTuple):
    """One call of a reward."""

    place: Place
    prompt: Prompt
    given: Any


class Scorer:
    """Rewards completions in the form that the task's reward asks for.

    Threads help with rewards that wait (for a judge, a sandbox, a file) or that release the GIL. All calls of an async
    reward run in one event loop, which lives as long as the scorer, so that the reward can keep its connections.
    """

    def __init__(self, task: Task, threads: int) -> None:
        """
        Args:
            task: computes the rewards; called from several threads at once, unless its reward is async.
            threads: most calls at a time; with 1, a reward that is not async is called in the calling thread.
        """
        self._task: Any = task
        self._threads = threads
        self._form = form_of_task(task)
        self._runner = asyncio.Runner() if self._form.is_async else None

    def score(
        self,
        groups: Sequence[Group],
        once: bool = False,
        report: Report = lambda message: None,
        tolerant: bool = False,
    ) -> list[Reward]:
        """Reward every completion, in the order given.

        Args:
            groups: pairs of a prompt and its completions.
            once: make the first call only.
            report: told of every call.
            tolerant: go on after a call that failed; ``report`` gets its error, and its rewards are left out.

        Raises:
            RewardError: the task raised it, gave a group another number of rewards than it has completions, or a score
                or metric is not finite or beyond +-1e38.
        """
        calls = self._calls(groups)[: 1 if once else None]
        watched = _Watched(report, tolerant)
        if self._runner is not None:
            results = self._runner.run(self._in_event_loop(calls, watched))
        elif self._threads == 1:
            results = [self._call(call, watched) for call in calls]
        else:
            results = self._in_threads(calls, watched)
        return [reward for rewards in results for reward in rewards]

    def close(self) -> None:
        """Close the event loop of an async reward."""
        if self._runner is not None:
            self._runner.close()

    def _calls(self, groups: Sequence[Group]) -> list[Call]:
        calls = []
        for index, (prompt, completions) in enumerate(groups):
            every = tuple(range(len(completions)))
            for number, given in enumerate(self._form.given(completions)):
                calls.append(Call((index, every if self._form.is_group else (number,)), prompt, given))
        return calls

    def _in_threads(self, calls: list[Call], watched: "_Watched") -> list[list[Reward]]:
        pool = ThreadPoolExecutor(min(self._threads, max(len(calls), 1)), thread_name_prefix="reward")
        try:
            return list(pool.map(lambda call: self._call(call, watched), calls))
        finally:
            # After an error: cancel rewards that have not begun, and do not wait for those that are running.
            pool.shutdown(wait=False, cancel_futures=True)

    async def _in_event_loop(self, calls: list[Call], watched: "_Watched") -> list[list[Reward]]:
        free = asyncio.Semaphore(self._threads)

        async def reward_of(call: Call) -> list[Reward]:
            async with free:
                with watched.call(call) as rewards:
                    rewards += self._checked(await self._task.reward(call.prompt, call.given), call.prompt, call.given)
            return rewards

        tasks = [asyncio.ensure_future(reward_of(call)) for call in calls]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=CANCEL_SECONDS)
            raise

    def _call(self, call: Call, watched: "_Watched") -> list[Reward]:
        with watched.call(call) as rewards:
            rewards += self._checked(self._task.reward(call.prompt, call.given), call.prompt, call.given)
        return rewards

    def _checked(self, result: Any, prompt: Prompt, given: Any) -> list[Reward]:
        if not self._form.is_group:
            return [check(result, prompt)]
        rewards = one_for_each(result, len(given), f"the reward of prompt '{prompt.id}'")
        return [check(reward, prompt) for reward in rewards]


class _Watched:
    """Reports calls, and keeps the errors of a tolerant scorer."""

    def __init__(self, report: Report, tolerant: bool) -> None:
        self._report, self._tolerant = report, tolerant

    @contextmanager
    def call(self, call: Call) -> Iterator[list[Reward]]:
        """Yield a list that takes the call's rewards."""
        rewards: list[Reward] = []
        self._report(("begin", call.place, call.prompt.id))
        try:
            yield rewards
        except MegarlError as error:
            if not self._tolerant:
                raise
            self._report(("failed", call.place, error))
        else:
            self._report(("end", call.place, rewards))


def check(reward: Reward, prompt: Prompt) -> Reward:
    """Return the reward. Raise ``RewardError`` if means over a step, or float32, could not hold it."""
    if not isinstance(reward.answer, str | None):
        raise RewardError(
            f"prompt '{prompt.id}': the reward's answer is {reward.answer!r}; it must be a string, empty if the "
            "completion gives none"
        )
    for label, value in (("score", reward.score), *((f"metric '{name}'", x) for name, x in reward.metrics.items())):
        if not abs(value) <= LARGEST_REWARD:
            raise RewardError(
                f"prompt '{prompt.id}': the reward's {label} is {value}; it must be finite and within "
                f"+-{LARGEST_REWARD:g}"
            )
    return reward
