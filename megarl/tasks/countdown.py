# SPDX-License-Identifier: Apache-2.0
"""Task ``countdown``: reach a target from given numbers with + - * /.

Rules, tags and scores follow TinyZero (github.com/Jiayi-Pan/TinyZero, ``verl/utils/reward_score/countdown.py``): every
number is used exactly once, the equation stands in ``<answer>...</answer>``, and a well-formed answer that is wrong
gets a small score. There are three differences. Arithmetic is exact (TinyZero: floats within 1e-5). ``**``, ``//`` and
decimal points, which TinyZero's ``eval`` accepts, are refused. The tags may stand anywhere (TinyZero: in the last
line).
"""

import random
import re
from fractions import Fraction
from typing import Annotated

from pydantic import Field, model_validator

from megarl.config.base import Section
from megarl.errors import ConfigError
from megarl.tasks.answers.expression import OPERATORS, evaluate
from megarl.tasks.base import Reward, TaskContext
from megarl.tasks.options import parse_options, require_path
from megarl.tasks.rows.files import Row, read_rows
from megarl.tasks.rows.rows_task import RowsTask
from megarl.types import Prompt

ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
MAX_DRAWS = 5_000  # for the first puzzle; after that the options are refused

QUESTION = (
    "Using the numbers {numbers}, write an expression that equals {target}. Use + - * / and parentheses, and each "
    "number exactly once. Think it through in <think> </think> tags, then give the expression alone in "
    "<answer> </answer> tags, for example <answer>(1 + 2) / 3</answer>."
)


class CountdownOptions(Section):
    min_numbers: int = Field(3, ge=2, le=6)
    """Fewest numbers in a puzzle."""
    max_numbers: int = Field(4, ge=2, le=6)
    """Most numbers in a puzzle."""
    min: int = Field(1, ge=1, le=10_000)
    """Smallest of the given numbers."""
    max: int = Field(99, ge=1, le=10_000)
    """Largest of the given numbers."""
    min_target: int = Field(10, ge=1, le=1_000_000)
    """Smallest target."""
    max_target: int = Field(99, ge=1, le=1_000_000)
    """Largest target."""
    size: int = Field(50_000, ge=1, le=10_000_000)
    """Number of prompts in the data set."""
    format_score: float = Field(0.1, ge=0.0, lt=1.0)
    """Score of a wrong expression in answer tags."""

    @model_validator(mode="after")
    def _check_ranges(self) -> "CountdownOptions":
        for low, high in (("min_numbers", "max_numbers"), ("min", "max"), ("min_target", "max_target")):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low} ({getattr(self, low)}) must be at most {high} ({getattr(self, high)})")
        return self


class CountdownRow(Row):
    numbers: Annotated[list[int], Field(min_length=2)]
    target: int


class CountdownTask:
    """Puzzles built from a solution, so that each has one; prompt ``i`` depends only on the seed and ``i``."""

    def __init__(self, options: CountdownOptions, seed: int) -> None:
        """
        Raises:
            ConfigError: the first puzzle cannot be made, because no random expression has a target in range.
        """
        self._options = options
        self._seed = seed
        if self._draw(self._random(0), MAX_DRAWS) is None:
            raise ConfigError(
                f"task.options: no target between min_target ({options.min_target}) and max_target "
                f"({options.max_target}) came up in {MAX_DRAWS} draws of {options.min_numbers} to "
                f"{options.max_numbers} numbers from {options.min} to {options.max}; widen the ranges"
            )

    def __len__(self) -> int:
        return self._options.size

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < len(self):
            raise IndexError(f"prompt {index} of a countdown task with {len(self)}")
        # The first puzzle was found, so this ends: every draw succeeds with the same probability.
        puzzle = None
        draw = self._random(index)
        while puzzle is None:
            puzzle = self._draw(draw, MAX_DRAWS)
        numbers, target = puzzle
        return puzzle_prompt(f"countdown-{index}", numbers, target)

    def _random(self, index: int) -> random.Random:
        return random.Random(f"countdown-{self._seed}-{index}")  # a string seed is the same in every process

    def _draw(self, draw: random.Random, tries: int) -> tuple[list[int], int] | None:
        """Draw numbers, and a target in range that a random expression over them has; None after ``tries`` failures."""
        options = self._options
        for _ in range(tries):
            count = draw.randint(options.min_numbers, options.max_numbers)
            numbers = [draw.randint(options.min, options.max) for _ in range(count)]
            value = _combine(draw, numbers)
            if value is not None and value.denominator == 1 and options.min_target <= value <= options.max_target:
                return numbers, int(value)
        return None

    def reward(self, prompt: Prompt, response: str) -> Reward:
        """See ``score``."""
        return score(prompt, response, self._options.format_score)


class CountdownRows(RowsTask[CountdownRow, CountdownOptions]):
    """Puzzles of a file, in its order; they are not solved to see if that is possible."""

    def prompt(self, name: str, row: CountdownRow) -> Prompt:
        """Return the puzzle's question; see ``puzzle_prompt``."""
        return puzzle_prompt(name, row.numbers, row.target)

    def reward(self, prompt: Prompt, response: str) -> Reward:
        """See ``score``."""
        return score(prompt, response, self.options.format_score)


def puzzle_prompt(name: str, numbers: list[int], target: int) -> Prompt:
    """Return the question, with what its reward needs as ``data``."""
    return Prompt(
        id=name,
        messages=({"role": "user", "content": QUESTION.format(numbers=numbers, target=target)},),
        data={"numbers": numbers, "target": target},
    )


def score(prompt: Prompt, response: str, format_score: float) -> Reward:
    """Score an expression: 1 if right, ``format_score`` if wrong but in answer tags, else 0.

    Right means that the content of the last answer tags equals the target and uses every number once.

    Metrics: ``correct`` and ``format`` (there is something in answer tags).
    """
    answers = ANSWER.findall(response)
    formatted = bool(answers and answers[-1].strip())
    correct = formatted and _solves(answers[-1], prompt.data["numbers"], prompt.data["target"])
    score = 1.0 if correct else format_score if formatted else 0.0
    # Expressions that solve the puzzle are one answer.
    given = f"= {prompt.data['target']}" if correct else answers[-1].strip() if formatted else ""
    return Reward(score, {"correct": float(correct), "format": float(formatted)}, given)


def _combine(draw: random.Random, numbers: list[int]) -> Fraction | None:
    """Return the value of a random expression tree over all ``numbers``, or None if it divides by zero."""
    values = [Fraction(number) for number in numbers]
    while len(values) > 1:
        left = values.pop(draw.randrange(len(values)))
        right = values.pop(draw.randrange(len(values)))
        apply = draw.choice(list(OPERATORS.values()))
        try:
            values.append(apply(left, right))
        except ZeroDivisionError:
            return None
    return values[0]


def _solves(expression: str, numbers: list[int], target: int) -> bool:
    try:
        value, used = evaluate(expression)
    except ValueError:
        return False
    return value == target and sorted(used) == sorted(numbers)


def build(context: TaskContext) -> CountdownTask | CountdownRows:
    """Make the task from ``task.options`` and ``train.seed``, or from the rows of ``task.path``.

    A row has ``numbers`` (a list of integers) and ``target`` (an integer). With rows, ``format_score`` is the only
    option that may be set: the others say how puzzles are made.

    Raises:
        ConfigError: wrong options, or no such file.
        DataError: bad rows, all in one message.
        UnsupportedError: another kind of file.
    """
    options = parse_options(context, CountdownOptions)
    if context.config.path is None:
        return CountdownTask(options, context.seed)
    if unused := sorted(set(context.config.options) - {"format_score"}):
        raise ConfigError(
            f"task.options.{unused[0]} is {context.config.options[unused[0]]!r}, but the puzzles are the rows of "
            "task.path; remove it, or remove task.path"
        )
    file = require_path(context)
    return CountdownRows(read_rows(file, CountdownRow), options, file.stem)
