# SPDX-License-Identifier: Apache-2.0
"""Test the section ``eval``: defaults are training's, and what cannot be measured is refused by name."""

import pytest

from megarl.config import override_config
from megarl.config.sections.eval import Sampling
from megarl.errors import ConfigError
from megarl.sampler.engine.settings import longest_sequence

RECIPE = {
    "model": {"path": "model"},
    "task": {"name": "arithmetic", "held_out": 4, "system_prompt": "Be brief.", "options": {"max": 9}},
    "sampler": {"samples_per_prompt": 4, "max_response_tokens": 16},
}


def sets_of(tasks: str, *overrides: str):
    return override_config(RECIPE, [f"eval.tasks={tasks}", *overrides])


def test_a_set_is_drawn_as_in_training_unless_it_says_otherwise():
    config = sets_of(
        "[{name: gsm8k, path: a.jsonl}, {name: arithmetic, samples: 1, temperature: 0, system_prompt: ''}]"
    )
    plain, greedy, held_out = config.evaluations
    assert plain.sampling(config.sampler) == Sampling(4, 1.0, 1.0, 16)
    assert greedy.sampling(config.sampler) == Sampling(1, 0, 1.0, 16)
    assert (held_out.key, held_out.name) == ("held_out", "held_out")
    assert (plain.task(config.task).system_prompt, greedy.task(config.task).system_prompt) == ("Be brief.", None)
    assert (plain.task(config.task).options, plain.task(config.task).path) == ({}, "a.jsonl")
    assert [one.key for one in sets_of("[{name: held_out, samples: 8}]").evaluations] == ["held_out"]
    assert sets_of("[{name: 'own.py:Echo'}]").evaluations[0].key == "Echo"
    assert sets_of("[]", "task.held_out=0").evaluations == []


def test_an_engine_has_room_for_the_longest_completion_of_any_set():
    assert longest_sequence(sets_of("[]").engine) == 512 + 16
    longer = sets_of("[{name: arithmetic, max_response_tokens: 100}]")
    assert (longest_sequence(longer.engine), longer.trainer.longest) == (512 + 100, 512 + 16)


@pytest.mark.parametrize(
    ("tasks", "overrides", "message"),
    [
        ("[]", ["task.held_out=0", "train.eval_every=5"], "there is nothing to evaluate on; set eval.tasks"),
        ("[{name: held_out}]", ["task.held_out=0"], "task.held_out is 0: the set has no prompts"),
        ("[{name: held_out, path: a.jsonl}]", [], r"eval.tasks\[0\].path is set, but the prompts of 'held_out'"),
        ("[{name: a, metrics: [pass@8]}]", [], r"asks for pass@8, but each prompt has 4 .*samples to at least 8"),
        ("[{name: a, samples: 2, metrics: [maj@3]}]", [], r"eval.tasks\[0\].metrics asks for maj@3"),
        ("[{name: a, metrics: [mean@3]}]", [], r"'mean@3' is not a metric; known are pass@K and maj@K"),
        ("[{name: a, metrics: [pass@0]}]", [], "'pass@0' is not a metric"),
        ("[{name: a}, {name: b, label: a}]", [], r"eval.tasks\[1\]: another set is called 'a' too"),
        ("[{name: a, label: a/b}]", [], "'a/b' cannot be part of a metric's name"),
        ("[{name: a, temperature: 0}]", [], "temperature is 0 with 4 samples, which would all be the same"),
        ("[{nam: a}]", [], r"unknown key 'eval.tasks.0.nam'; did you mean 'name'"),
    ],
)
def test_what_cannot_be_measured_is_refused(tasks, overrides, message):
    with pytest.raises(ConfigError, match=message):
        sets_of(tasks, *overrides)
