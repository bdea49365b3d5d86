# SPDX-License-Identifier: Apache-2.0
"""Test build_task: names, options, paths, and the user's own rewards."""

import numpy as np
import pytest

from megarl.errors import ConfigError, RewardError
from megarl.tasks import TASKS, Reward
from megarl.tasks.rewards.forms import RewardForm, form_of_task
from tests.unit.tasks.support import make


def message_of(error=ConfigError, **config):
    with pytest.raises(error) as caught:
        make(**config)
    return str(caught.value)


def test_an_unknown_task_names_the_nearest():
    message = message_of(name="arithmetics")
    assert "unknown task 'arithmetics'; did you mean 'arithmetic'?" in message
    assert "known: arithmetic, calculator, countdown, gsm8k, guessing, jsonl, reasoning_gym" in message


@pytest.mark.parametrize("name", TASKS)
def test_a_wrong_option_reads_like_a_wrong_config_key(name, tmp_path):
    message = message_of(name=name, options={"siz": 3, "format_score": "x", "instructionn": ""}, path=None)
    assert "unknown key 'task.options.siz'" in message
    assert "(known: " in message


def test_a_misspelt_option_names_the_nearest():
    message = message_of(name="arithmetic", options={"maxx": 3})
    assert message == (
        "unknown key 'task.options.maxx'; did you mean 'max'? (known: min, max, operands, operators, digit_score, size)"
    )


@pytest.mark.parametrize(
    ("name", "options", "part"),
    [
        ("arithmetic", {"max": "9"}, "'task.options.max' is '9': input should be a valid integer"),
        ("arithmetic", {"operators": ["/"]}, "'task.options.operators.0' is '/': input should be '+', '-' or '*'"),
        ("arithmetic", {"operators": []}, "'task.options.operators' is []"),
        ("arithmetic", {"min": 5, "max": 3}, "task.options: min (5) must be at most max (3)"),
        ("arithmetic", {"operands": 1}, "'task.options.operands' is 1"),
        ("countdown", {"min_numbers": 5}, "task.options: min_numbers (5) must be at most max_numbers (4)"),
        ("countdown", {"max": 1, "min_target": 90}, "task.options: no target between min_target (90)"),
        ("gsm8k", {"format_score": 1.0}, "'task.options.format_score' is 1.0"),
    ],
)
def test_a_wrong_value_names_option_value_and_rule(name, options, part):
    assert part in message_of(name=name, options=options)


def test_a_path_is_refused_where_none_is_read_and_required_where_one_is():
    assert "task.path is 'x.jsonl', but task 'arithmetic' generates" in message_of(name="arithmetic", path="x.jsonl")
    assert "task.path is required: task 'gsm8k'" in message_of(name="gsm8k")


def test_a_missing_file_names_both_places_looked_in(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    message = message_of(recipe_dir=tmp_path, name="gsm8k", path="x.jsonl")
    assert f"no file {tmp_path / 'x.jsonl'} or {tmp_path / 'here' / 'x.jsonl'}" in message


def test_a_relative_path_is_looked_up_beside_the_recipe_then_in_the_current_folder(tmp_path, monkeypatch):
    beside, here = tmp_path / "recipe", tmp_path / "here"
    for folder in (beside, here):
        folder.mkdir()
        (folder / "both.jsonl").write_text(f'{{"question": "{folder.name}?", "answer": "#### 1"}}')
    (here / "one.jsonl").write_text('{"question": "only here?", "answer": "#### 1"}')
    monkeypatch.chdir(here)
    assert "recipe?" in make(beside, name="gsm8k", path="both.jsonl")[0].messages[0]["content"]
    assert "only here?" in make(beside, name="gsm8k", path="one.jsonl")[0].messages[0]["content"]


REWARD = """
from megarl.tasks import Reward

def length(prompt, response):
    return len(response)

def detailed(prompt, response):
    return Reward(0.5, {"long": len(response) > 3})

def one_argument(prompt):
    return 1.0

number = 3
"""


@pytest.fixture
def reward_file(tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    return tmp_path


def test_a_reward_of_the_users_own_replaces_that_of_any_task(reward_file):
    task = make(reward_file, name="arithmetic", reward="reward.py:length", options={"size": 3})
    plain = make(reward_file, name="arithmetic", options={"size": 3})
    assert len(task) == 3
    assert task[1] == plain[1]
    assert task.reward(task[1], "abc") == Reward(3.0)
    detailed = make(reward_file, name="countdown", reward="reward.py:detailed")
    assert detailed.reward(detailed[0], "abcd") == Reward(0.5, {"long": 1.0})


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        ("reward.py", "must have the form file.py:Name or package.module:Name"),
        (":length", "must have the form file.py:Name"),
        ("reward.py:", "must have the form file.py:Name"),
        ("no_such.module:length", "no_such.module cannot be imported"),
        ("none.py:length", "task.reward is 'none.py', but there is no file"),
        ("reward.py:lenght", "has no 'lenght'; did you mean 'length'?"),
        ("reward.py:number", "task.reward is 'reward.py:number', which is 3; it must be a function"),
        ("reward.py:one_argument", "must take (prompt, response)"),
        ("broken.py:f", "cannot be imported: SyntaxError"),
        ("raises.py:f", "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_a_config_error(reward_file, spec, part):
    (reward_file / "broken.py").write_text("def f(:")
    (reward_file / "raises.py").write_text("import no_such_module")
    assert part in message_of(recipe_dir=reward_file, name="arithmetic", reward=spec)


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ("return None", "returned None (NoneType) as the score"),
        ("return '1'", "returned '1' (str) as the score"),
        ("return (1.0, {})", "(tuple) as the score"),
        ("return float('nan')", "returned nan as the score for prompt 'arithmetic-0'; it must be finite"),
        ("return float('-inf')", "it must be finite"),
        (
            "return 1e308",
            "returned 1e+308 as the score for prompt 'arithmetic-0'; it must be finite and within +-1e+38",
        ),
        ("return 10**5000", "returned inf as the score"),
        ("return Reward(1.0, {'x': None})", "returned None (NoneType) as metric 'x'"),
        ("return Reward(1.0, {'x': float('inf')})", "returned inf as metric 'x'"),
        ("return prompt.data['nothing']", "raised KeyError for prompt 'arithmetic-0': 'nothing'"),
        ("raise ValueError('signal only works in main thread')", "main thread; set task.reward_threads=1"),
        ("raise SystemError('boom')", "raised SystemError for prompt 'arithmetic-0': boom"),
    ],
)
def test_a_reward_that_fails_names_function_prompt_and_cause(tmp_path, body, part):
    (tmp_path / "bad.py").write_text(f"from megarl.tasks import Reward\ndef f(prompt, response):\n    {body}\n")
    task = make(tmp_path, name="arithmetic", reward="bad.py:f")
    with pytest.raises(RewardError) as caught:
        task.reward(task[0], "x")
    assert "task.reward bad.py:f" in str(caught.value)
    assert part in str(caught.value)


@pytest.mark.parametrize("value", ["True", "1", "np.float32(0.5)", "np.int64(3)", "np.bool_(True)"])
def test_every_kind_of_number_is_a_score(tmp_path, value):
    (tmp_path / "ok.py").write_text(f"import numpy as np\ndef f(prompt, response):\n    return {value}\n")
    task = make(tmp_path, name="arithmetic", reward="ok.py:f")
    score = task.reward(task[0], "x").score
    assert type(score) is float
    assert score == float(eval(value, {"np": np}))


def components(folder, body, weights):
    (folder / "parts.py").write_text(f"def f(prompt, response):\n    return {body}\n")
    return make(folder, name="arithmetic", reward="parts.py:f", reward_weights=weights)


def test_components_are_summed_by_weight_and_logged(tmp_path):
    task = components(tmp_path, "{'correct': True, 'format': 0.5}", {"correct": 1.0, "format": -0.2})
    assert task.reward(task[0], "x") == Reward(0.9, {"correct": 1.0, "format": 0.5})


@pytest.mark.parametrize(
    ("body", "weights", "part"),
    [
        ("{'correct': 1, 'fromat': 0}", {"correct": 1.0, "format": 1.0}, "'fromat', which has no weight; did you mean"),
        ("{'correct': 1}", {}, "component 'correct', which has no weight; set task.reward_weights.correct"),
        ("{'correct': 1}", {"correct": 1.0, "format": 1.0}, "returned no component 'format'"),
        ("1.0", {"correct": 1.0}, "task.reward_weights is set, but task.reward parts.py:f returned 1.0"),
        ("{'correct': None}", {"correct": 1.0}, "returned None (NoneType) as component 'correct'"),
        ("{'correct': 1e38}", {"correct": 10.0}, "as the score for prompt"),
    ],
)
def test_components_and_weights_that_do_not_match_are_named(tmp_path, body, weights, part):
    task = components(tmp_path, body, weights)
    with pytest.raises(RewardError) as caught:
        task.reward(task[0], "x")
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ("[1.0]", "task.reward group.py:f for prompt 'arithmetic-0' returned 1 verdicts for 2 completions: [1.0]"),
        ("1.0", "returned 1.0 (float); it was given 2 completions: return a list of 2, one verdict for each"),
        ("np.array(2)", "returned 1 verdicts for 2 completions"),
        ("[1.0, None]", "task.reward group.py:f returned None (NoneType) as the score for prompt 'arithmetic-0'"),
        ("responses[2]", "task.reward group.py:f raised IndexError for prompt 'arithmetic-0'"),
    ],
)
def test_a_group_without_one_verdict_for_each_names_function_prompt_and_value(tmp_path, body, part):
    (tmp_path / "group.py").write_text(f"import numpy as np\ndef f(prompt, responses):\n    return {body}\n")
    task = make(tmp_path, name="arithmetic", reward="group.py:f")
    with pytest.raises(RewardError) as caught:
        task.reward(task[0], ["x", "y"])
    assert part in str(caught.value)


def test_the_second_parameters_name_says_what_a_reward_is_given(tmp_path):
    (tmp_path / "forms.py").write_text(
        "async def a(prompt, completion, k=1): ...\ndef b(p, responses): ...\ndef c(completion, text): ...\n"
    )
    forms = {name: make(tmp_path, name="arithmetic", reward=f"forms.py:{name}").reward_form for name in "abc"}
    assert forms == {"a": RewardForm("completion", True), "b": RewardForm("responses"), "c": RewardForm()}
    assert form_of_task(make(name="arithmetic")) == RewardForm("response", False)


def test_weights_without_a_reward_are_refused():
    assert "task.reward_weights is set, but task.reward is not" in message_of(
        name="arithmetic", reward_weights={"correct": 1.0}
    )


def test_a_reward_of_an_installed_module_is_loaded():
    task = make(name="arithmetic", reward="operator:eq")
    assert task.reward(task[0], "x").score == 0.0
