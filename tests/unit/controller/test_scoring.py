# SPDX-License-Identifier: Apache-2.0
"""Test rewards: in order, several at a time, and refused by the prompt's name."""

import threading
import time

import pytest

from megarl.controller.scoring import score_all
from megarl.errors import RewardError
from megarl.tasks.base import Reward
from megarl.types import Prompt

PAIRS = [(Prompt(f"train-{index}", ()), str(index)) for index in range(32)]


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
    assert [reward.score for reward in score_all(task, PAIRS, threads)] == [float(index) for index in range(32)]
    assert task.most <= threads


def test_rewards_that_wait_wait_together():
    task = WaitingTask()
    score_all(task, PAIRS, 32)
    assert task.most > 16


def test_one_thread_is_the_callers_own():
    task = WaitingTask(seconds=0)
    score_all(task, PAIRS, 1)
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
        score_all(WaitingTask(0.001, {"train-7": reward}), PAIRS, threads)


def test_after_an_error_no_further_reward_is_begun():
    task = WaitingTask(0.01, {"train-0": Reward(float("nan"))})
    with pytest.raises(RewardError):
        score_all(task, PAIRS * 20, 2)
    begun = task.now
    time.sleep(0.2)
    assert task.now == 0 <= begun <= 2
