# SPDX-License-Identifier: Apache-2.0
"""Test the environments that megarl brings, against a policy that says what the test wants."""

import asyncio

import pytest

from megarl.bench.character_tokenizer import make_tokenizer
from megarl.config import TaskConfig
from megarl.errors import ConfigError
from megarl.tasks import TaskContext, build_task
from megarl.tasks.base import is_environment
from tests.helpers.scripted import Policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(path)
    return path


def make(folder, name, **options):
    return build_task(TaskContext(TaskConfig(name=name, options=options), folder, 3))


def play(folder, task, index, texts, **limits):
    client = Policy(folder, texts).client(tokens=2000, turn_tokens=2000, **limits)
    trajectory = asyncio.run(task.rollout(task[index], client))
    return trajectory, client.decode(trajectory.sequences[0].response_ids, special=True)


@pytest.mark.parametrize("name", ["guessing", "calculator"])
def test_prompts_are_the_same_at_every_call_and_differ(folder, name):
    task, again = make(folder, name), make(folder, name)
    assert is_environment(task) and task[5] == again[5]
    assert len({tuple(task[index].data.values()) for index in range(50)}) > 5
    with pytest.raises(IndexError):
        task[len(task)]


def test_a_guess_is_answered_by_higher_or_lower_and_the_number_ends_the_game(folder):
    task = make(folder, "guessing", width=100)
    index = next(i for i in range(99) if 40 < task[i].data["number"] < 60)
    number = task[index].data["number"]
    won, text = play(folder, task, index, ["40", "60.", f"It is {number}"])
    assert text == (
        f"40<|end|><|user|>Higher.<|end|><|assistant|>60.<|end|><|user|>Lower.<|end|><|assistant|>It is {number}<|end|>"
    )
    assert won.reward.score == pytest.approx(0.8) and won.reward.metrics == {"correct": 1.0, "listened": 1.0}
    deaf, _ = play(folder, task, index, ["40", "30", "none", "20"])
    assert deaf.reward.score == pytest.approx(0.5 / 4) and deaf.reward.metrics == {"correct": 0.0, "listened": 0.25}


def test_a_game_that_a_limit_ends_still_has_its_reward(folder):
    task = make(folder, "guessing", width=100)
    index = next(i for i in range(99) if task[i].data["number"] > 40)
    cut, _ = play(folder, task, index, ["40"], turns=1)
    assert cut.finish_reason == "turns" and cut.reward.metrics == {"correct": 0.0, "listened": 1.0}


def test_the_calculator_is_called_and_its_result_is_not_drawn(folder):
    task = make(folder, "calculator", min=100, max=999, operands=3)
    prompt = task[0]
    answer = str(prompt.data["answer"])
    sum_ = prompt.messages[0]["content"].removeprefix("What is ").partition("?")[0]
    right, text = play(folder, task, 0, [f"calc({sum_})", answer])
    assert right.reward.score == 1.0 and right.reward.metrics == {"correct": 1.0, "calls": 1.0}
    # The test's tokenizer has no token for <|tool|>'s role, so its characters are looked at.
    assert f"tool|>{answer}<|end|>" in text
    [sequence] = right.sequences
    assert int(sequence.drawn.sum()) == len(f"calc({sum_})") + len(answer) + 2
    wordy, _ = play(folder, task, 0, [f"It is {answer}"])
    used, _ = play(folder, task, 0, [f"calc({sum_})", "no idea"])
    wrong, _ = play(folder, task, 0, ["calc(2 + x)", "7"])
    assert [one.reward.score for one in (wordy, used, wrong)] == [0.6, 0.2, 0.0]
    cut, _ = play(folder, task, 0, [f"calc({sum_})"], turns=3)
    assert (cut.finish_reason, cut.reward.score, cut.reward.metrics["calls"]) == ("turns", 0.2, 3.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"name": "guessing", "options": {"min": 9, "max": 9}},
            r"width \(10\) exceeds the numbers",
        ),
        ({"name": "guessing", "reward": "r.py:f"}, "is an environment, which gives the reward of its episodes itself"),
        ({"name": "calculator", "path": "rows.jsonl"}, "generates its prompts; remove it"),
        ({"name": "guesing"}, "did you mean 'guessing'"),
    ],
)
def test_wrong_settings_are_refused(folder, settings, message):
    with pytest.raises(ConfigError, match=message):
        build_task(TaskContext(TaskConfig(**settings), folder, 0))
