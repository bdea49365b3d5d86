# SPDX-License-Identifier: Apache-2.0
"""Check that the batches of a reward process do not mix: of several threads, after a failure elsewhere, at the end."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megarl.config import TaskConfig
from megarl.controller.rollouts.rewarding.rewards import RewardProcess
from megarl.errors import RewardError, WorkerError
from megarl.tasks import TaskContext
from tests.unit.controller.test_rewards import numbered

REWARD = """
import time

def number(prompt, response):
    time.sleep(0.4 if prompt.id == "p1" else 0.05)
    return float(response)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., RewardProcess]]:
    (tmp_path / "reward.py").write_text(REWARD)
    started: list[RewardProcess] = []

    def begin(threads: int = 1, **settings) -> RewardProcess:
        task = TaskConfig(name="arithmetic", reward="reward.py:number", reward_threads=threads, **settings)
        started.append(RewardProcess(TaskContext(task, tmp_path, 0), tmp_path / "rewards.log"))
        started[-1].score(numbered(1, 1))
        return started[-1]

    yield begin
    for process in started:
        process.close()


def test_threads_score_one_after_the_other_and_notice_failures_while_they_wait(start) -> None:
    process = start(threads=2)
    with ThreadPoolExecutor(3) as pool:
        each = [pool.submit(process.score, numbered(2, size)) for size in (1, 2, 3)]
        scores = [[reward.score for reward in one.result()] for one in each]
        assert scores == [[0.0] * 2, [0.0, 1.0] * 2, [0.0, 1.0, 2.0] * 2]
        busy = pool.submit(process.score, numbered(20, 1))
        time.sleep(0.2)
        with pytest.raises(WorkerError, match="lost"):
            process.score(numbered(1, 1), lost)
        assert [reward.score for reward in busy.result()] == [0.0] * 20


def test_failures_are_noticed_also_while_rewards_keep_coming(start) -> None:
    process, looks = start(), list[float]()
    process.score(numbered(24, 1), lambda: looks.append(time.monotonic()))  # one each 0.05 s
    assert len(looks) >= 3


def lost() -> None:
    raise WorkerError("a rank is lost")


def test_after_a_failure_elsewhere_the_next_batch_has_rewards_of_its_own(start) -> None:
    process = start()
    with pytest.raises(WorkerError, match="lost"):
        process.score(numbered(4, 1), lost)
    assert [reward.score for reward in process.score(numbered(1, 3))] == [0.0, 1.0, 2.0]


def test_a_process_that_was_closed_while_it_scored_does_not_begin_again(start) -> None:
    process = start(reward_errors="zero", reward_retries=3)
    with ThreadPoolExecutor(1) as pool:
        scored = pool.submit(process.score, numbered(50, 1))
        time.sleep(0.3)
        process.close()
        with pytest.raises(RewardError, match="the run has ended"):
            scored.result(timeout=30)
    assert process._process.poll() is not None
