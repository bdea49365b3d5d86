# SPDX-License-Identifier: Apache-2.0
"""Test arithmetic and countdown: reproducible prompts, and rewards that cannot be cheated."""

import itertools
import re
import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.tasks.answers.expression import evaluate
from megarl.types import Prompt
from tests.helpers.timing import fastest
from tests.unit.tasks.support import make


@pytest.mark.parametrize("name", ["arithmetic", "countdown"])
def test_a_prompt_depends_on_seed_and_index_alone(name):
    task = make(name=name, seed=7)
    first = [task[i] for i in range(20)]
    assert [make(name=name, seed=7, options={"size": 20})[i] for i in reversed(range(20))] == first[::-1]
    assert [make(name=name, seed=8)[i] for i in range(20)] != first
    assert len({prompt.messages[0]["content"] for prompt in first}) > 10
    assert len({prompt.id for prompt in first}) == 20


@pytest.mark.parametrize("name", ["arithmetic", "countdown"])
def test_a_prompt_is_the_same_in_another_process(name):
    code = f"from tests.unit.tasks.support import make; print(make(name='{name}', seed=3)[41])"
    environment = {"PYTHONHASHSEED": "12345"}
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, env=environment
    )
    assert other.stdout.strip() == str(make(name=name, seed=3)[41])


@pytest.mark.parametrize("name", ["arithmetic", "countdown"])
def test_indices_end_with_the_size(name):
    task = make(name=name, options={"size": 3})
    assert len(task) == 3
    assert len(list(iter(task))) == 3  # ends by IndexError
    for index in (3, -1):
        with pytest.raises(IndexError):
            task[index]


def test_the_answer_of_a_sum_is_what_python_computes():
    task = make(name="arithmetic", options={"min": 0, "max": 30, "operands": 4, "operators": ["+", "-", "*"]})
    for index in range(300):
        prompt = task[index]
        sum_ = re.fullmatch(r"What is ([0-9+*\- ]+)\? Reply with the number only\.", prompt.messages[0]["content"])
        assert prompt.data["answer"] == eval(sum_[1])


def prompt_with_answer(task, wanted):
    return next(prompt for prompt in task if wanted(prompt.data["answer"]))


@pytest.mark.parametrize(
    ("response", "score", "correct", "exact"),
    [
        ("{n}", 1.0, 1.0, 1.0),
        (" {n}\n", 1.0, 1.0, 1.0),
        ("3 + 4 = {n}", 0.6, 1.0, 0.0),
        ("The answer is {n}.", 0.6, 1.0, 0.0),
        ("{n}.", 0.6, 1.0, 0.0),
        ("{n} or 99999", 0.0, 0.0, 0.0),
        ("99999", 0.1, 0.0, 0.0),
        ("-{n}", 0.1, 0.0, 0.0),
        ("0{n}", 0.1, 0.0, 0.0),
        ("= -{n}", 0.0, 0.0, 0.0),
        ("{n}0 apples", 0.0, 0.0, 0.0),
        ("", 0.0, 0.0, 0.0),
        ("seven", 0.0, 0.0, 0.0),
        ("٣", 0.0, 0.0, 0.0),
        ("9" * 20_000, 0.1, 0.0, 0.0),  # int() would refuse so many digits
        ("1 " * 20_000, 0.0, 0.0, 0.0),
    ],
)
def test_the_arithmetic_reward_follows_its_table(response, score, correct, exact):
    task = make(name="arithmetic", options={"min": 5})
    prompt = prompt_with_answer(task, lambda answer: answer > 9)
    reward = task.reward(prompt, response.replace("{n}", str(prompt.data["answer"])))
    assert (reward.score, reward.metrics) == (score, {"correct": correct, "exact": exact})


def test_a_negative_answer_is_recognised_and_a_difference_is_none():
    task = make(name="arithmetic", options={"operators": ["-"]})
    prompt = prompt_with_answer(task, lambda answer: answer < 0)
    n = -prompt.data["answer"]
    assert task.reward(prompt, f"-{n}").score == 1.0
    assert task.reward(prompt, f"3 - 10 = -{n}").score == 0.6
    assert task.reward(prompt, f"so 10-{n}").score == 0.0


def reachable(numbers: tuple[Fraction, ...]) -> set[Fraction]:
    """Return all values of expressions that use every number once, by exhaustive search (unlike the puzzles)."""
    if len(numbers) == 1:
        return {numbers[0]}
    values = set()
    for size in range(1, len(numbers)):
        for chosen in itertools.combinations(range(len(numbers)), size):
            left = tuple(numbers[i] for i in chosen)
            right = tuple(numbers[i] for i in range(len(numbers)) if i not in chosen)
            for a, b in itertools.product(reachable(left), reachable(right)):
                values |= {a + b, a - b, a * b} | ({a / b} if b else set())
    return values


def test_every_countdown_puzzle_can_be_solved_with_all_its_numbers():
    task = make(name="countdown", options={"max": 30})
    for index in range(25):
        data = task[index].data
        assert 3 <= len(data["numbers"]) <= 4
        assert all(1 <= number <= 30 for number in data["numbers"])
        assert 10 <= data["target"] <= 99
        assert data["target"] in reachable(tuple(map(Fraction, data["numbers"])))
        assert str(data["numbers"]) in task[index].messages[0]["content"]
        assert f"equals {data['target']}." in task[index].messages[0]["content"]


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<answer>(8 - 2) * 4 / 1</answer>", 1.0),
        ("<think>8*4</think>\n<answer>\n 4*(8-2)*1 \n</answer> done", 1.0),
        ("<answer>-(2-8)*4*1</answer>", 1.0),
        ("<answer>8/(1/(4-2+1))</answer>", 0.1),  # 1 twice
        ("<answer>4*(8-2)</answer>", 0.1),  # 1 not used
        ("<answer>8*4-2*4*1</answer>", 0.1),  # 4 twice
        ("<answer>4*(8-2)*1 = 24</answer>", 0.1),
        ("<answer>24</answer>", 0.1),
        ("<answer>(8+2)*4*1</answer>", 0.1),
        ("<answer>8/(2-2)</answer>", 0.1),
        ("<answer>1**8*24</answer>", 0.1),
        ("<answer>2**8**4**1</answer>", 0.1),
        ("<answer>48//2</answer>", 0.1),
        ("<answer>__import__('os')</answer>", 0.1),
        ("<answer>(8-2)*4/1</answer> or rather <answer>1</answer>", 0.1),
        ("<answer>1</answer> or rather <answer>(8-2)*4/1</answer>", 1.0),
        ("<answer> in <answer> tags: <answer>(8-2)*4/1</answer>", 1.0),
        ("<answer></answer>", 0.0),
        ("<answer>(8-2)*4/1", 0.0),
        ("(8-2)*4/1", 0.0),
        ("", 0.0),
    ],
)
def test_the_countdown_reward_follows_tinyzeros_rules(response, score):
    task = make(name="countdown")
    prompt = type(task[0])("x", task[0].messages, {"numbers": [8, 2, 4, 1], "target": 24})
    reward = task.reward(prompt, response)
    assert reward.score == score
    assert reward.metrics == {"correct": float(score == 1.0), "format": float(score > 0)}


EXPRESSIONS = st.recursive(
    st.integers(0, 999).map(str),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", " + ", " * "]), inner).map("".join),
        inner.map(lambda text: f"({text})"),
        inner.map(lambda text: f"-{text}"),
    ),
    max_leaves=12,
)


@given(EXPRESSIONS)
@settings(max_examples=300)
def test_the_evaluator_agrees_with_python_on_exact_fractions(text):
    if len(text) > 200:
        return
    numbers = re.findall(r"[0-9]+", text)
    try:
        expected = eval(re.sub(r"([0-9]+)", r"Fraction(\1)", text))
    except ZeroDivisionError:
        with pytest.raises(ValueError, match="division by zero"):
            evaluate(text)
        return
    assert evaluate(text) == (expected, [int(number) for number in numbers])


@pytest.mark.parametrize(
    "text",
    [
        "", "()", "1 2", "1+", "2**3", "7//2", "1.5", "1e3", "x", "a+1", "f(1)", "3(4)", "[1]", "1,2", "1<2",
        "1 if 1 else 2", "0x10", "1_000", "007", "~1", "+1", "'1'", "lambda:1", "1;2", "1=1", "٣+1", "9" * 13,
        "1+" * 100 + "1", "(" * 100, "-" * 199, "1/0", "1/(2-2)",
    ],
)  # fmt: skip
def test_whatever_is_no_expression_is_refused_at_once(text):
    def refuse():
        with pytest.raises(ValueError):
            evaluate(text)

    assert fastest(refuse) < 0.1


def test_deep_but_valid_nesting_is_evaluated():
    assert evaluate("(" * 99 + "1" + ")" * 99) == (1, [1])
    assert evaluate("-" * 150 + "1") == (1, [1])


@pytest.mark.parametrize(
    ("response", "score"),
    [("128", 1.0), ("It is 128.", 0.6), ("It is 127.", 0.2), ("It is 28.", 0.2), ("It is -128.", 0.0), ("118", 0.3),
     ("It is 1280.", 0.0), ("12 and 8", 0.1), ("none", 0.0)],
)  # fmt: skip
def test_right_digits_of_a_wrong_number_earn_their_share(response, score):
    task = make(name="arithmetic", options={"max": 99, "digit_score": 0.3})
    prompt = Prompt("p", ({"role": "user", "content": "What is 99 + 29?"},), {"answer": 128})
    assert task.reward(prompt, response).score == pytest.approx(score)
