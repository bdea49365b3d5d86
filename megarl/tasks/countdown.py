# SPDX-License-Identifier: Apache-2.0
"""The Countdown game: reach a target from given numbers with + - * /.

Rules, tags and scores follow TinyZero (github.com/Jiayi-Pan/TinyZero, ``verl/utils/reward_score/countdown.py``):
every number is used exactly once, the equation stands in ``<answer>...</answer>``, and a well-formed answer that is
wrong gets a small score. Three differences: arithmetic is exact (TinyZero: floats within 1e-5); ``**``, ``//`` and
decimal points, which its ``eval`` lets through, are refused; the tags may stand anywhere (TinyZero: in the last line).
"""

import random
import re
from fractions import Fraction

from pydantic import Field, model_validator

from megarl.config.base import Section
from megarl.errors import ConfigError
from megarl.tasks.base import Reward, TaskContext
from megarl.tasks.expression import OPERATORS, evaluate
from megarl.tasks.options import parse_options, refuse_path
from megarl.types import Prompt

ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
MAX_DRAWS = 5_000  # for the first puzzle, before the options are declared hopeless

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
    """Smallest number given."""
    max: int = Field(99, ge=1, le=10_000)
    """Largest number given."""
    min_target: int = Field(10, ge=1, le=1_000_000)
    """Smallest target."""
    max_target: int = Field(99, ge=1, le=1_000_000)
    """Largest target."""
    size: int = Field(50_000, ge=1, le=10_000_000)
    """Prompts in the data set."""
    format_score: float = Field(0.1, ge=0.0, lt=1.0)
    """Score of a wrong expression in answer tags."""

    @model_validator(mode="after")
    def _check_ranges(self) -> "CountdownOptions":
        for low, high in (("min_numbers", "max_numbers"), ("min", "max"), ("min_target", "max_target")):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low} ({getattr(self, low)}) must be at most {high} ({getattr(self, high)})")
        return self


class CountdownTask:
    """Puzzles made backwards from a solution, so that each can be solved; prompt ``i`` depends on seed and ``i``."""

    def __init__(self, options: CountdownOptions, seed: int) -> None:
        """
        Raises:
            ConfigError: the first puzzle cannot be made: no target in range is in reach.
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
        return Prompt(
            id=f"countdown-{index}",
            messages=({"role": "user", "content": QUESTION.format(numbers=numbers, target=target)},),
            data={"numbers": numbers, "target": target},
        )

    def _random(self, index: int) -> random.Random:
        return random.Random(f"countdown-{self._seed}-{index}")  # a string seed is the same in every process

    def _draw(self, draw: random.Random, tries: int) -> tuple[list[int], int] | None:
        """Numbers and a target in range that a random expression over them has, or None after so many tries."""
        options = self._options
        for _ in range(tries):
            count = draw.randint(options.min_numbers, options.max_numbers)
            numbers = [draw.randint(options.min, options.max) for _ in range(count)]
            value = _combine(draw, numbers)
            if value is not None and value.denominator == 1 and options.min_target <= value <= options.max_target:
                return numbers, int(value)
        return None

    def reward(self, prompt: Prompt, response: str) -> Reward:
        """Score 1 for an expression that equals the target and uses every number once, ``format_score`` for any
        other content of the last answer tags, else 0.

        Metrics: ``correct`` and ``format`` (something stands in answer tags).
        """
        answers = ANSWER.findall(response)
        formatted = bool(answers and answers[-1].strip())
        correct = formatted and _solves(answers[-1], prompt.data["numbers"], prompt.data["target"])
        score = 1.0 if correct else self._options.format_score if formatted else 0.0
        return Reward(score, {"correct": float(correct), "format": float(formatted)})


def _combine(draw: random.Random, numbers: list[int]) -> Fraction | None:
    """Value of a random expression tree over all ``numbers``, or None if it divides by zero."""
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


def build(context: TaskContext) -> CountdownTask:
    """Make the task from ``task.options`` and ``train.seed``.

    Raises:
        ConfigError: wrong options, or ``task.path`` is set.
    """
    refuse_path(context)
    return CountdownTask(parse_options(context, CountdownOptions), context.seed)
