# SPDX-License-Identifier: Apache-2.0
"""Check that whatever a reward does, the run goes on or ends with a named error."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from megarl.config import TaskConfig
from megarl.controller.rewards import RewardProcess
from megarl.errors import ConfigError, RewardError, WorkerError
from megarl.tasks import TaskContext
from megarl.tasks.custom_reward import load_reward
from megarl.types import Prompt

REWARDS = """
import os, re, subprocess, sys, threading, time
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
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., RewardProcess]]:
    (tmp_path / "reward.py").write_text(REWARDS)
    started: list[RewardProcess] = []

    def begin(function: str, seconds: float = 60.0, threads: int = 4) -> RewardProcess:
        settings = {"reward": f"reward.py:{function}", "reward_seconds": seconds, "reward_threads": threads}
        context = TaskContext(TaskConfig(name="arithmetic", **settings), tmp_path, 0)
        started.append(RewardProcess(context, tmp_path / "logs" / "rewards.log"))
        return started[-1]

    yield begin
    for process in started:
        process.close()


def pairs(count: int = 2) -> list[tuple[Prompt, str]]:
    return [(Prompt(f"p{index}", ()), str(index)) for index in range(count)]


def test_rewards_come_in_order_from_one_other_process_that_keeps_its_state(start, tmp_path: Path) -> None:
    process = start("counted", threads=1)
    assert [reward.score for reward in process.score(pairs(3))] == [0.01, 1.02, 2.03]
    assert [reward.score for reward in process.score(pairs(2))] == [0.04, 1.05]
    assert "scoring p2" in (tmp_path / "logs" / "rewards.log").read_text()
    [child] = {reward.score for reward in start("own_process").score(pairs(8))}
    assert child != os.getpid()
    assert start("needs_the_main_thread", threads=1).score(pairs(1))[0].score == 1.0


def test_rewards_that_wait_do_so_together(start) -> None:
    process = start("slow", threads=8)
    process.score(pairs(1))
    began = time.monotonic()
    process.score(pairs(8))
    assert time.monotonic() - began < 8 * 0.4 / 2


@pytest.mark.parametrize("function", ["hangs", "keeps_the_lock"])
def test_a_reward_that_hangs_is_named_with_its_limit_and_leaves_nothing(start, function: str, tmp_path: Path) -> None:
    process = start(function, seconds=1.0)
    began = time.monotonic()
    with pytest.raises(RewardError) as caught:
        process.score(pairs())
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
    ],
)
def test_a_reward_that_exits_or_crashes_is_an_error_that_names_the_prompt(start, function: str, message: str) -> None:
    with pytest.raises(RewardError, match=rf"^{message}\nlog of the rewards: "):
        start(function).score(pairs(1))


def test_other_failures_are_noticed_while_rewards_are_computed(start) -> None:
    def look() -> None:
        raise WorkerError("trainer rank 1 has given no sign of life")

    with pytest.raises(WorkerError, match=r"^trainer rank 1 has given no sign of life$"):
        start("hangs").score(pairs(), look)


def test_a_reward_file_that_exits_when_it_is_imported_is_refused(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("import sys\nsys.exit(0)\n")
    config = TaskConfig(name="arithmetic", reward="reward.py:f")
    with pytest.raises(ConfigError, match="cannot be imported: SystemExit: 0"):
        load_reward(TaskContext(config, tmp_path, 0), "reward.py:f")


def test_a_dry_run_gives_the_rewards_own_traceback_and_uses_no_value(start, tmp_path: Path) -> None:
    prompt = Prompt("p0", ())
    assert start("own_process").dry_run(prompt) is None
    with pytest.raises(RewardError) as caught:
        start("counted").dry_run(prompt)  # float("This is ...")
    message = str(caught.value)
    assert message.startswith("dry run of the reward (task.reward_dry_run): task.reward reward.py:counted raised")
    assert f'File "{tmp_path}/reward.py", line' in message
    assert "in counted" in message
    assert message.splitlines()[-1].startswith("ValueError: could not convert string to float")
    with pytest.raises(RewardError, match=r"^dry run of the reward .*the reward process was killed by SIGABRT"):
        start("crashes").dry_run(prompt)
