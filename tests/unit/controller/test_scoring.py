# SPDX-License-Identifier: Apache-2.0
"""Test rewards: in order, several at a time, and refused by the prompt's name."""

import asyncio
import threading
import time

import numpy as np
import pytest

from megarl.controller.rollouts.rewarding.scoring import Scorer
from megarl.errors import RewardError
from megarl.tasks.base import Reward
from megarl.types import DecodedCompletion, Prompt


def decoded(text):
    return DecodedCompletion(text, "stop", np.array([1, 2]))


GROUPS = [(Prompt(f"train-{index}", ()), [decoded(str(index))]) for index in range(32)]


class WaitingTask:
    """Scores a response by its number, after a while. Counts how many responses it scores at once."""

    def __init__(self, seconds=0.05, special=None):
        self.seconds, self.special = seconds, special or {}
        self.now, self.most, self.threads = 0, 0, set()
        self._lock = threading.Lock()

    def reward(self, prompt, response):
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
            self.threads.add(threading.current_thread())
        time.sleep(self.seconds * (1 + int(response) % 3))
        with self._lock:
            self.now -= 1
        return self.special.get(prompt.id) or Reward(float(response), {"length": float(len(response))})


@pytest.mark.parametrize("threads", [1, 4, 64])
def test_rewards_come_in_the_order_of_the_completions(threads):
    task = WaitingTask(seconds=0.002)
    assert [reward.score for reward in Scorer(task, threads).score(GROUPS)] == [float(index) for index in range(32)]
    assert task.most <= threads


def test_rewards_that_wait_wait_together():
    task = WaitingTask()
    Scorer(task, 32).score(GROUPS)
    assert task.most > 16


def test_one_thread_is_the_callers_own():
    task = WaitingTask(seconds=0)
    Scorer(task, 1).score(GROUPS)
    assert task.threads == {threading.current_thread()}


@pytest.mark.parametrize("threads", [1, 8])
@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (Reward(1e308), r"prompt 'train-7': the reward's score is 1e\+308; it must be finite and within \+-1e\+38"),
        (Reward(float("nan")), "prompt 'train-7': the reward's score is nan"),
        (Reward(0.0, {"x": float("-inf")}), "prompt 'train-7': the reward's metric 'x' is -inf"),
    ],
)
def test_a_reward_that_no_mean_can_hold_names_its_prompt(reward, message, threads):
    with pytest.raises(RewardError, match=message):
        Scorer(WaitingTask(0.001, {"train-7": reward}), threads).score(GROUPS)


def test_after_an_error_no_further_reward_is_begun():
    task = WaitingTask(0.01, {"train-0": Reward(float("nan"))})
    with pytest.raises(RewardError):
        Scorer(task, 2).score(GROUPS * 20)
    begun = task.now
    time.sleep(0.2)
    assert task.now == 0 <= begun <= 2


class Judge:
    """Scores by waiting in an event loop; counts the calls at a time."""

    def __init__(self, special=None):
        self.now, self.most, self.loops, self.begun, self.special = 0, 0, set(), 0, special

    async def reward(self, prompt, completions):
        self.now, self.begun = self.now + 1, self.begun + 1
        self.most = max(self.most, self.now)
        self.loops.add(asyncio.get_running_loop())
        try:
            await asyncio.sleep(0.01)
        finally:
            self.now -= 1
        if self.special and prompt.id == "p3":
            return self.special
        return [Reward(float(item.text) + len(completions)) for item in completions]


BIG_GROUPS = [(Prompt(f"p{index}", ()), [decoded(f"{index}.{part}") for part in (1, 2)]) for index in range(8)]


def test_an_async_reward_runs_in_one_event_loop_with_so_many_calls_at_a_time():
    judge = Judge()
    scorer = Scorer(judge, 3)
    expected = [index + 2 + part / 10 for index in range(8) for part in (1, 2)]
    for _ in range(2):
        assert [reward.score for reward in scorer.score(BIG_GROUPS)] == pytest.approx(expected)
    assert judge.most == 3
    assert len(judge.loops) == 1
    assert len(scorer.score(BIG_GROUPS, once=True)) == 2
    scorer.close()


@pytest.mark.parametrize(
    ("special", "message"),
    [
        ([Reward(1.0)], "the reward of prompt 'p3' returned 1 verdicts for 2 completions"),
        ("ab", r"the reward of prompt 'p3' returned 'ab' \(str\); it was given 2 completions: return a list of 2"),
        ([Reward(1.0), Reward(float("nan"))], "prompt 'p3': the reward's score is nan"),
    ],
)
def test_a_wrong_verdict_on_a_group_names_the_prompt_and_ends_the_other_calls(special, message):
    judge = Judge(special)
    scorer = Scorer(judge, 2)
    with pytest.raises(RewardError, match=message):
        scorer.score(BIG_GROUPS)
    assert judge.now == 0
    assert judge.begun < len(BIG_GROUPS)
    scorer.close()
