# SPDX-License-Identifier: Apache-2.0
"""Test gsm8k: prompts from rows, and answers graded by math-verify in any thread and in bounded time."""

import json
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import math_verify
import pytest

from megarl.tasks import gsm8k
from megarl.tasks.gsm8k import is_equal, last_boxed
from tests.helpers.timing import fastest
from tests.unit.tasks.support import make

EXAMPLE = Path(__file__).parents[3] / "examples" / "gsm8k"


@pytest.fixture
def task():
    return make(EXAMPLE, name="gsm8k", path="sample.jsonl")


def rosa(task):
    """Return the sample whose reference is written 1,260."""
    return next(prompt for prompt in task if prompt.data["answer"] == "1260")


def test_every_row_is_a_prompt_with_its_reference(task):
    lines = (EXAMPLE / "sample.jsonl").read_text().splitlines()
    assert len(task) == len(lines)
    for index, prompt in enumerate(task):
        assert prompt.id == f"sample-{index + 1}"
        assert prompt.messages[0]["content"].endswith("\\boxed{}.")
        assert "####" not in prompt.messages[0]["content"]
        assert lines[index].rpartition("#### ")[2].rstrip('"}').replace(",", "") == prompt.data["answer"]


def test_the_arithmetic_of_the_sample_rows_is_right():
    for line in (EXAMPLE / "sample.jsonl").read_text().splitlines():
        answer = json.loads(line)["answer"]
        steps = re.findall(r"<<(.+?)=(.+?)>>", answer)
        assert all(eval(left) == float(right) for left, right in steps)
        if steps:
            assert float(steps[-1][1]) == float(answer.rpartition("####")[2].replace(",", ""))


RESPONSES = [
    ("\\boxed{1260}", 1.0),
    ("so \\boxed{1,260}.", 1.0),
    ("\\boxed{\\$1260}", 1.0),
    ("$\\boxed{1260.00}$", 1.0),
    ("\\boxed{1260 \\text{ dollars}}", 1.0),
    ("\\boxed{\\frac{2520}{2}}", 1.0),
    ("\\boxed{1{,}260}", 1.0),
    ("\\boxed{12} no: \\boxed{1260}", 1.0),
    ("\\boxed{1260} no: \\boxed{12}", 0.0),
    ("\\boxed{1260} and then \\boxed{12", 1.0),
    ("\\boxed{-1260}", 0.0),
    ("\\boxed{126}", 0.0),
    ("\\boxed{1260, 5}", 0.0),
    ("\\boxed{x}", 0.0),
    ("\\boxed{}", 0.0),
    ("#### 1,260", 1.0),
    ("She earns **$1,260**.", 1.0),
    ("1260 dollars in 2 weeks", 0.0),
    ("5-1260", 1.0),
    ("= -1260", 0.0),
    ("no idea", 0.0),
    ("", 0.0),
    ("\\boxed{" * 20_000, 0.0),
    ("9" * 50_000, 0.0),
]


@pytest.mark.parametrize(("response", "score"), RESPONSES)
def test_the_final_answer_is_graded(task, response, score):
    start = time.perf_counter()
    reward = task.reward(rosa(task), response)
    assert reward.score == reward.metrics["correct"] == score
    assert time.perf_counter() - start < 5


def test_the_format_counts_as_the_options_say():
    prompt = make(EXAMPLE, name="gsm8k", path="sample.jsonl")[0]
    strict = make(EXAMPLE, name="gsm8k", path="sample.jsonl", options={"require_boxed": True, "format_score": 0.2})
    right = prompt.data["answer"]
    scores = [strict.reward(prompt, text).score for text in (f"\\boxed{{{right}}}", "\\boxed{1}", right, "\\boxed{ }")]
    assert scores == [1.0, 0.2, 0.0, 0.0]
    assert strict.reward(prompt, "\\boxed{1}").metrics == {"correct": 0.0, "format": 1.0}


def test_grading_works_off_the_main_thread(task):
    gsm8k._math_verify.cache_clear()  # drops verdicts of the main thread
    with ThreadPoolExecutor(4) as pool:
        scores = list(pool.map(lambda pair: task.reward(rosa(task), pair[0]).score, RESPONSES[:16]))
    assert scores == [score for _, score in RESPONSES[:16]]


@pytest.mark.parametrize(
    "answer", ["72", "72.0", "72.5", "-72", "144/2", "\\frac{144}{2}", "7200\\%", "x = 72", "72 m", "(72)", "72, 73"]
)
def test_the_verdict_is_math_verifys(answer):
    gold = math_verify.parse("\\boxed{72}")
    assert is_equal("72", answer) == math_verify.verify(gold, math_verify.parse(f"\\boxed{{{answer}}}"))


FORMS = [
    "1\\,200", "1\\;200", "1\\ 200", "1~200", "1 200", "1\\!200", "1,\\!200", "1{,}200", "1\\thinspace 200",
    "1\u202f200", "1200^\\circ", "1200^{\\circ}", "1200\\degree", "1200°", "1200^\\circ\\text{C}", "\\approx 1200",
    "\\approx1200", "≈ 1200", "\\sim 1200", "= 1200", "x = 1200", "x \\approx 1200", "\\$1,200.00", "€1200",
    "\\pounds 1200", "1200\\,\\text{km}", "1200~\\text{km}", "1200 \\text{ m}^2", "1200\\ \\mathrm{m}^{2}",
    "1200\\text{ dollars per week}", "1200 dollars", "1200 dollars per week", "\\mathbf{1200}", "\\text{1200}",
    "\\underline{1200}", "\\boldsymbol{1200}", "**1200**", "1200.", "\\text{Answer: }1200", "1200^{\\text{th}}",
    "1.2\\times 10^3", "1.2 \\cdot 10^{3}", "\\(1200\\)", "$1200$", "1200\\%",
]  # fmt: skip


@pytest.mark.parametrize("answer", FORMS)
def test_a_number_counts_in_every_way_it_is_written(answer):
    assert is_equal("1200", answer)
    assert not is_equal("1201", answer) and not is_equal("-1200", answer)
    assert not is_equal("1200", answer.replace("2", "3"))


@pytest.mark.parametrize(
    "answer",
    ["1\\,20", "12\\,00", "1\\,200\\,000", "1 2 0 0", "1, 200", "1200^2", "1200^{3}", "120^\\circ", "1201^\\circ",
     "\\approx 1201", "1200x", "1200, 5", "1200\\text{ or }5", "1200 \\pm 3", "x \\neq 1200", "< 1200", "\\leq 1200",
     "1200\\sqrt{2}", "1200\\pi", "1200 pi", "1200 thousand", "1200 squared", "1.2\\times 10^2", "\\frac{1200}{7}",
     "1200:7", "1200\\text{ m}^2 + 1"],
)  # fmt: skip
def test_what_only_looks_like_the_number_does_not_count(answer):
    assert not is_equal("1200", answer)


@pytest.mark.parametrize(
    "answer",
    ["9^{9^{9^{9}}}", "9**9**9**9", "99999999!", "\\sum_{i=1}{9}", "\\binom{99999999}{9999999}", "1e999999",
     "-E-9E999999", "9/" * 49 + "9", "(" * 20 + "9" + ")" * 20, "a" * 101],
)  # fmt: skip
def test_answers_that_could_be_computed_on_for_ever_are_wrong_at_once(answer):
    def judge():
        gsm8k._math_verify.cache_clear()  # no repetition may be answered from the cache
        assert not is_equal("72", answer)

    assert fastest(judge) < 0.01


def test_no_answer_that_passes_the_guards_takes_long():
    """A fuzz test; 200 s of it (80,000 answers) found 0.9 s at most."""
    pieces = [
        *"9./*+-(){}=<|%,xeE_; ",
        "99",
        "1.5",
        "sin",
        "\\frac{9}{9}",
        "\\frac",
        "\\text{a}",
        "\\left(",
        "\\right)",
    ]
    pieces += ["\\times ", "\\div "]
    draw = random.Random(0)
    is_equal("1", "1")  # imports SymPy
    for _ in range(600):
        chosen = draw.sample(pieces, draw.randint(2, 6))
        answer = "".join(draw.choice(chosen) for _ in range(draw.randint(1, 20)))
        start = time.perf_counter()
        is_equal("1200", answer)
        assert time.perf_counter() - start < 10, answer


def test_the_last_complete_box_is_found():
    assert last_boxed("\\boxed{a{b}c} \\boxed{d") == "a{b}c"
    assert last_boxed("\\boxed{\\boxed{3}}") == "3"
    assert last_boxed("\\boxed {3}") is None
