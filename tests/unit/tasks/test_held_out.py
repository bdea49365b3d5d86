# SPDX-License-Identifier: Apache-2.0
"""Check that held-out prompts are never trained on."""

import pytest

from megarl.errors import ConfigError
from megarl.tasks.held_out import last_prompts, training_part
from tests.unit.tasks.support import make


def asked(prompt):
    return prompt.messages[0]["content"]


def test_no_training_prompt_asks_what_a_held_out_one_asks():
    task = make(name="arithmetic", options={"max": 6, "size": 400})  # 36 different sums
    train, held_out = training_part(task, 20), last_prompts(task, 20)
    questions = {asked(prompt) for prompt in held_out}
    assert [prompt.id for prompt in held_out] == [f"arithmetic-{index}" for index in range(380, 400)]
    assert any(asked(task[index]) in questions for index in range(380))
    assert len(train) == 380
    assert not questions & {asked(train[index]) for index in range(380)}
    assert train[7] == train[7]
    evaluated = [task[3], task[5]]
    whole = training_part(task, 0, evaluated)
    assert not {asked(prompt) for prompt in evaluated} & {asked(whole[index]) for index in range(400)}
    with pytest.raises(IndexError):
        train[380]


def test_nothing_held_out_is_the_task_itself():
    task = make(name="arithmetic")
    assert training_part(task, 0) is task and last_prompts(task, 0) == []


def test_a_task_that_has_nothing_else_to_train_on_is_refused():
    with pytest.raises(ConfigError, match="every other prompt asks the same"):
        training_part(make(name="arithmetic", options={"min": 2, "max": 2, "size": 9}), 3)
    with pytest.raises(ConfigError, match=r"task\.held_out is 9, but the task has 9 prompts"):
        training_part(make(name="arithmetic", options={"size": 9}), 9)
