# SPDX-License-Identifier: Apache-2.0
"""Check that whatever a reward does, the run goes on or ends with a named error."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from megarl.config import TaskConfig
from megarl.controller.rollouts.rewarding.judges import start_judge
from megarl.controller.rollouts.rewarding.pool import RewardPool
from megarl.controller.rollouts.rewarding.rewards import RewardProcess
from megarl.controller.rollouts.rewarding.scoring import Group
from megarl.errors import ConfigError, RewardError, WorkerError
from megarl.tasks import Reward, TaskContext
from megarl.tasks.base import NOTHING
from megarl.tasks.rewards.custom_reward import load_reward
from megarl.types import DecodedCompletion, Prompt

REWARDS = """
import asyncio, os, re, subprocess, sys, threading, time
import numpy as np
from megarl.errors import DataError

calls = 0

def counted(prompt, response):
    global calls
    calls += 1
    print("scoring", prompt.id)
    return float(response) + calls / 100

def own_process(prompt, response):
    return os.getpid()

def hangs(prompt, response):
    if prompt.id == "p1":
        subprocess.Popen(["sleep", "1000"])
        time.sleep(1000)
    return 1.0

def keeps_the_lock(prompt, response):
    return re.match(r"(a|aa)+$", "a" * 60 + "b") is not None

def leaves(prompt, response):
    sys.exit(0)

def leaves_hard(prompt, response):
    os._exit(0)

def crashes(prompt, response):
    os.abort()

def interrupts(prompt, response):
    raise KeyboardInterrupt

def needs_the_main_thread(prompt, response):
    return float(threading.current_thread() is threading.main_thread())

def slow(prompt, response):
    time.sleep(0.4)
    return 1.0

def by_completion(prompt, completion):
    assert completion.response_ids.dtype == "int64"
    return {"ids": int(completion.response_ids.sum()), "length": completion.finish_reason == "length"}

def by_responses(prompt, responses):
    return [len(responses) + int(text) for text in responses] if responses[0].isdigit() else [0.0] * len(responses)

def fails_once(prompt, response):
    marker = prompt.id + response
    if not os.path.exists(marker):
        open(marker, "w").close()
        raise ValueError("the judge is busy")
    return float(response) + 1

def fails_for_two(prompt, response):
    if response == "2":
        raise ValueError("never")
    if prompt.id == "p1" and response == "1":
        time.sleep(1000)
    if prompt.id == "p0" and response == "1":
        os.abort()
    return float(response) + 1

async def fails_for_two_async(prompt, response):
    if prompt.id == "p0" and response == "1":
        raise ValueError("no")
    return fails_for_two(prompt, response)

def all_or_none(prompt, responses):
    if prompt.id == "p1":
        raise ValueError("no")
    return [1.0] * len(responses)

class Judge:
    async def __call__(self, prompt, completions):
        await asyncio.sleep(0)
        return np.array([len(completions)] * len(completions)) / 4

judge = Judge()

async def hangs_async(prompt, completion):
    await asyncio.sleep(1000 if prompt.id == "p1" else 0)
    return 1.0

async def crashes_async(prompt, completions):
    os.abort()

async def leaves_async(prompt, completion):
    sys.exit(0)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., RewardProcess]]:
    (tmp_path / "reward.py").write_text(REWARDS)
    started: list[RewardProcess] = []

    def begin(function: str, seconds: float = 60.0, threads: int = 4, **settings) -> RewardProcess:
        settings |= {"reward": f"reward.py:{function}", "reward_seconds": seconds, "reward_threads": threads}
        context = TaskContext(TaskConfig(name="arithmetic", **settings), tmp_path, 0)
        started.append(RewardProcess(context, tmp_path / "logs" / "rewards.log"))
        return started[-1]

    yield begin
    for process in started:
        process.close()


def groups(count: int = 2, size: int = 1) -> list[Group]:
    ids = np.array([5, 6])
    return [(Prompt(f"p{i}", ()), [DecodedCompletion(str(i), "length", ids)] * size) for i in range(count)]


def test_rewards_come_in_order_from_one_other_process_that_keeps_its_state(start, tmp_path: Path) -> None:
    process = start("counted", threads=1)
    assert [reward.score for reward in process.score(groups(3))] == [0.01, 1.02, 2.03]
    assert [reward.score for reward in process.score(groups(2))] == [0.04, 1.05]
    assert "scoring p2" in (tmp_path / "logs" / "rewards.log").read_text()
    [child] = {reward.score for reward in start("own_process").score(groups(8))}
    assert child != os.getpid()
    assert start("needs_the_main_thread", threads=1).score(groups(1))[0].score == 1.0


def test_rewards_that_wait_do_so_together(start) -> None:
    process = start("slow", threads=8)
    process.score(groups(1))
    began = time.monotonic()
    process.score(groups(8))
    assert time.monotonic() - began < 8 * 0.4 / 2


@pytest.mark.parametrize("function", ["hangs", "hangs_async", "keeps_the_lock"])
def test_a_reward_that_hangs_is_named_with_its_limit_and_leaves_nothing(start, function: str, tmp_path: Path) -> None:
    process = start(function, seconds=1.0)
    began = time.monotonic()
    with pytest.raises(RewardError) as caught:
        process.score(groups())
    assert time.monotonic() - began < 15
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("a reward took longer than task.reward_seconds (1 s); being scored were completions of")
    assert "  prompt 'p1'" in lines or function == "keeps_the_lock"
    assert lines[-1] == f"log of the rewards: {tmp_path / 'logs' / 'rewards.log'}"
    reward_process = psutil.Process(process._process.pid)
    family = [reward_process, *reward_process.children(recursive=True)]
    process.close()
    assert psutil.wait_procs(family, timeout=5)[1] == []


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("leaves", r"prompt 'p0': the reward called sys.exit\(0\)"),
        ("interrupts", "prompt 'p0': the reward raised KeyboardInterrupt: "),
        ("leaves_hard", "the reward process exited with status 0; being scored were completions of\n  prompt 'p0'"),
        ("crashes", "the reward process was killed by SIGABRT; being scored were completions of\n  prompt 'p0'"),
        ("leaves_async", r"prompt 'p0': the reward called sys.exit\(0\)"),
        ("crashes_async", "the reward process was killed by SIGABRT; being scored were completions of\n  prompt 'p0'"),
    ],
)
def test_a_reward_that_exits_or_crashes_is_an_error_that_names_the_prompt(start, function: str, message: str) -> None:
    with pytest.raises(RewardError, match=rf"^{message}\nlog of the rewards: "):
        start(function).score(groups(1))


def test_every_form_of_a_reward_is_scored_and_has_a_dry_run(start) -> None:
    by_completion = start("by_completion", reward_weights={"ids": 1.0, "length": 0.5})
    assert by_completion.score(groups(1)) == [Reward(11.5, {"ids": 11.0, "length": 1.0})]
    by_responses = start("by_responses")
    assert [reward.score for reward in by_responses.score(groups(2, size=3))] == [3, 3, 3, 4, 4, 4]
    by_responses.dry_run(Prompt("p0", ()), [1, 2], 5)
    judge = start("judge")
    judge.dry_run(Prompt("p0", ()), [1, 2], 5)
    assert [reward.score for reward in judge.score(groups(2, size=2))] == [0.5] * 4


def numbered(count: int, size: int) -> list[Group]:
    ids = np.array([5, 6])
    return [(Prompt(f"p{i}", ()), [DecodedCompletion(str(j), "stop", ids) for j in range(size)]) for i in range(count)]


def test_a_reward_that_fails_is_tried_again(start, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    process = start("fails_once", reward_retries=1)
    assert [reward.score for reward in process.score(numbered(2, 3))] == [1.0, 2.0, 3.0] * 2
    (tmp_path / "p01").unlink()
    with pytest.raises(RewardError, match="raised ValueError for prompt 'p0': the judge is busy"):
        start("fails_once").score(numbered(1, 2))


def test_a_reward_that_raises_hangs_or_crashes_is_a_zero_by_choice_and_the_others_are_kept(start) -> None:
    process = start("fails_for_two", seconds=1.0, threads=1, reward_errors="zero")
    expected = [Reward(1.0), NOTHING, NOTHING, Reward(1.0), NOTHING, NOTHING, Reward(1.0), Reward(2.0), NOTHING]
    assert process.score(numbered(3, 3)) == expected
    assert process.score(numbered(1, 1)) == [Reward(1.0)], "the process was not replaced"
    grouped = start("all_or_none", reward_errors="zero")
    assert grouped.score(numbered(2, 2)) == [Reward(1.0), Reward(1.0), NOTHING, NOTHING]
    with pytest.raises(RewardError, match="dry run"):
        start("fails_for_two", reward_errors="zero").dry_run(Prompt("p0", ()))


def test_several_processes_keep_the_order(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARDS)
    settings = {"reward": "reward.py:fails_for_two", "reward_errors": "zero", "reward_seconds": 2.0}
    context = TaskContext(TaskConfig(name="arithmetic", reward_processes=2, **settings), tmp_path, 0)
    pool = start_judge(context, tmp_path / "rewards.log", "", False)
    assert isinstance(pool, RewardPool)
    try:
        scores = [reward.score for reward in pool.score(numbered(5, 1) + numbered(3, 3)[2:])]
        assert scores == [1.0] * 5 + [1.0, 2.0, 0.0]
    finally:
        pool.close()
        pool.close()


def test_other_failures_are_noticed_while_rewards_are_computed(start) -> None:
    def look() -> None:
        raise WorkerError("trainer rank 1 has given no sign of life")

    with pytest.raises(WorkerError, match=r"^trainer rank 1 has given no sign of life$"):
        start("hangs").score(groups(), look)


def test_a_reward_file_that_exits_when_it_is_imported_is_refused(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("import sys\nsys.exit(0)\n")
    config = TaskConfig(name="arithmetic", reward="reward.py:f")
    with pytest.raises(ConfigError, match="cannot be imported: SystemExit: 0"):
        load_reward(TaskContext(config, tmp_path, 0), "reward.py:f")


def test_a_dry_run_gives_the_rewards_own_traceback_and_uses_no_value(start, tmp_path: Path) -> None:
    prompt = Prompt("p0", ())
    assert isinstance(start("own_process").dry_run(prompt), Reward)
    with pytest.raises(RewardError) as caught:
        start("counted").dry_run(prompt)  # float("This is ...")
    message = str(caught.value)
    assert message.startswith("dry run of the reward (task.reward_dry_run): task.reward reward.py:counted raised")
    assert f'File "{tmp_path}/reward.py", line' in message
    assert "in counted" in message
    assert message.splitlines()[-1].startswith("ValueError: could not convert string to float")
    with pytest.raises(RewardError, match=r"^dry run of the reward .*the reward process was killed by SIGABRT"):
        start("crashes").dry_run(prompt)
