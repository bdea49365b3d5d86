# SPDX-License-Identifier: Apache-2.0
"""Task ``gsm8k``: grade-school word problems in GSM8K's format (Cobbe et al. 2021, arXiv:2110.14168).

math-verify grades the answers. Rows are ``{"question": ..., "answer": "... #### 42"}``; the reference is the number
after ``####``.
"""

import re
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from megarl.config.base import Section
from megarl.tasks.answers.latex_number import tidy
from megarl.tasks.base import Reward, TaskContext
from megarl.tasks.options import parse_options, require_path
from megarl.tasks.rows.files import Row, Text, read_rows
from megarl.tasks.rows.rows_task import RowsTask
from megarl.types import Prompt

MARK = "####"
REFERENCE = re.compile(r"-?\$?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?")
# A number within a text. In "10-5" the minus is not part of a number.
NUMBER_IN_TEXT = re.compile(r"(?:(?<![0-9])-)?\$?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?")

# Only short numeric answers reach math-verify. Its own timeouts are signals, which work in the main thread only, and
# SymPy evaluates anything: \boxed{9^{9^{9^9}}} or a chain of 50 divisions would never return. So an answer may have no
# powers (1e999999 is one), factorials or functions, and few signs. A fuzz test bounds the time of accepted answers.
MAX_CHARACTERS = 60
MAX_SIGNS = 10
COMMAND = re.compile(r"\\(?:d?frac|tfrac|text|textbf|mathrm|mathbf|times|cdot|div|left|right|quad|[,; $%])")
UNBOUNDED = re.compile(r"[\\^!]|\*\*|[0-9.]\s*[eE]\s*[-+]?\s*[0-9]")
SIGN = re.compile(r"[^\w\s.,$%]", re.ASCII)


def _with_reference(answer: str) -> str:
    _, mark, reference = answer.rpartition(MARK)
    if not mark:
        raise ValueError(f"it must end with '{MARK} <number>'")
    if not REFERENCE.fullmatch(reference.strip()):
        raise ValueError(f"'{reference.strip()[:40]}' after {MARK} is not a number")
    return answer


class Gsm8kRow(Row):
    question: Text
    answer: Annotated[Text, AfterValidator(_with_reference)]


class Gsm8kOptions(Section):
    instruction: str = "Think step by step, then give the answer, a single number, in \\boxed{}."
    """Text put after every question."""
    require_boxed: bool = False
    """Score 0 for an answer outside ``\\boxed{}``. If False, the last number counts when nothing is boxed."""
    format_score: float = Field(0.0, ge=0.0, lt=1.0)
    """Score of a wrong answer in ``\\boxed{}``."""


class Gsm8kTask(RowsTask[Gsm8kRow, Gsm8kOptions]):
    """One prompt per row, in file order."""

    def prompt(self, name: str, row: Gsm8kRow) -> Prompt:
        """Return the question with the instruction; the reference is the number after ``####``."""
        question = f"{row.question.strip()}\n\n{self.options.instruction}".strip()
        reference = row.answer.rpartition(MARK)[2].strip().replace(",", "").replace("$", "")
        return Prompt(id=name, messages=({"role": "user", "content": question},), data={"answer": reference})

    def reward(self, prompt: Prompt, response: str) -> Reward:
        """Score 1 if math-verify finds the final answer equal to the reference, else ``format_score`` if it is boxed.

        The final answer is the content of the last ``\\boxed{}``. If there is none, it is the last number of the text
        (unless ``require_boxed``). Works in any thread.

        Metrics: ``correct``, ``format`` (something is boxed).
        """
        boxed = last_boxed(response)
        answer = boxed
        if boxed is None and not self.options.require_boxed:
            numbers = NUMBER_IN_TEXT.findall(response)
            answer = numbers[-1].replace("$", "") if numbers else None
        correct = answer is not None and is_equal(prompt.data["answer"], answer)
        formatted = bool(boxed and boxed.strip())
        score = 1.0 if correct else self.options.format_score if formatted else 0.0
        # Right answers are equal, however they are written.
        given = prompt.data["answer"] if correct else tidy((answer or "")[:MAX_CHARACTERS]).strip()
        return Reward(score, {"correct": float(correct), "format": float(formatted)}, given)


def last_boxed(text: str) -> str | None:
    """Return the content of the last complete ``\\boxed{...}`` with balanced inner braces, or None."""
    opening = "\\boxed{"
    while (start := text.rfind(opening)) >= 0:
        depth = 0
        for position in range(start + len(opening) - 1, len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[start + len(opening) : position]
        text = text[:start]  # this one is cut off; an earlier one may be complete
    return None


def is_equal(reference: str, answer: str) -> bool:
    """Return True if math-verify finds ``answer`` (LaTeX) equal to ``reference`` (a plain number).

    An answer is wrong if it has more than ``MAX_CHARACTERS`` characters or ``MAX_SIGNS`` signs, or a power, factorial
    or function, which no plain number needs.
    """
    if len(answer) > MAX_CHARACTERS:
        return False
    answer = tidy(answer)
    if len(SIGN.findall(answer)) > MAX_SIGNS:
        return False
    return not UNBOUNDED.search(COMMAND.sub(" ", answer)) and _math_verify(reference, answer)


@lru_cache(maxsize=4096)
def _math_verify(reference: str, answer: str) -> bool:
    """Compare without the limits of ``is_equal``. Cached, since samples of a group often have the same answer."""
    from math_verify import verify

    # Timeouts need the main thread; the limits of is_equal bound the work instead.
    return bool(verify(_parse(reference), _parse(answer), timeout_seconds=None))


def _parse(latex: str) -> Any:
    from math_verify import LatexExtractionConfig, parse

    return parse(
        f"\\boxed{{{latex}}}", extraction_config=[LatexExtractionConfig(boxed_match_priority=0)], parsing_timeout=None
    )


def build(context: TaskContext) -> Gsm8kTask:
    """Build the task from the file that ``task.path`` names.

    Raises:
        ConfigError: wrong options, no ``task.path``, no such file.
        DataError: some rows are bad; one message reports all of them.
        UnsupportedError: the file is not JSONL, parquet or CSV.
    """
    options = parse_options(context, Gsm8kOptions)
    file: Path = require_path(context)
    return Gsm8kTask(read_rows(file, Gsm8kRow), options, file.stem)
