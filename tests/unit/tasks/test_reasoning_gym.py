# SPDX-License-Identifier: Apache-2.0
"""Test the puzzles of reasoning-gym: with the package if it is installed, and what is said if it is not."""

import importlib.util

import pytest

from megarl.config import TaskConfig
from megarl.errors import ConfigError
from megarl.tasks import TaskContext, build_task

INSTALLED = importlib.util.find_spec("reasoning_gym") is not None
NAMES = ("basic_arithmetic", "chain_sum", "countdown", "number_sorting", "spell_backward")


def make(tmp_path, seed=3, **options):
    return build_task(TaskContext(TaskConfig(name="reasoning_gym", options=options), tmp_path, seed))


@pytest.mark.skipif(INSTALLED, reason="reasoning-gym is installed")
def test_a_missing_package_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"needs the package reasoning-gym .* pip install reasoning-gym"):
        make(tmp_path, dataset="basic_arithmetic")


@pytest.mark.skipif(not INSTALLED, reason="reasoning-gym is not installed")
@pytest.mark.parametrize("name", NAMES)
def test_the_packages_own_answers_are_right_and_prompts_repeat(tmp_path, name):
    task, again, other = make(tmp_path, dataset=name), make(tmp_path, dataset=name), make(tmp_path, 4, dataset=name)
    assert [task[i] for i in range(8)] == [again[i] for i in range(8)]
    assert [task[i].messages for i in range(8)] != [other[i].messages for i in range(8)]
    for index in (0, 7, len(task) - 1):
        prompt = task[index]
        right = task.reward(prompt, f"So <answer>1</answer>, no: <answer>\n{prompt.data['answer']} </answer>.")
        assert right.score == 1.0 and right.metrics == {"correct": 1.0, "answered": 1.0}
        assert right.answer == str(prompt.data["answer"]).strip()
        assert task.reward(prompt, "no idea").metrics == {"correct": 0.0, "answered": 0.0}
    whole = make(tmp_path, dataset=name, answer="whole")
    assert "<answer>" not in whole[0].messages[0]["content"]
    assert whole.reward(whole[0], f" {whole[0].data['answer']}\n").score == 1.0


@pytest.mark.skipif(not INSTALLED, reason="reasoning-gym is not installed")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "basic_aritmetic"}, "no generator of reasoning_gym; did you mean 'basic_arithmetic'"),
        ({"dataset": "chain_sum", "settings": {"min_term": 1}}, "chain_sum refuses: .*min_term"),
        ({"dataset": "chain_sum", "settings": {"min_terms": -1}}, "chain_sum refuses: min_terms must be positive"),
        ({}, "task.options.dataset"),
    ],
)
def test_wrong_options_are_refused(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        make(tmp_path, **options)
