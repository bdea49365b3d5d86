# SPDX-License-Identifier: Apache-2.0
"""Task ``arithmetic``: short sums with one verifiable answer, small enough to learn on two CPU cores."""

import random
import re
from typing import Literal

from pydantic import Field, model_validator

from megarl.config.base import Section
from megarl.tasks.answers.expression import evaluate
from megarl.tasks.base import Reward, TaskContext
from megarl.tasks.options import parse_options, refuse_path
from megarl.types import Prompt

INTEGER = re.compile(r"-?[0-9]+")
# A number within a text. In "10-5" the minus is not part of a number.
INTEGER_IN_TEXT = re.compile(r"(?:(?<![0-9])-)?[0-9]+")

EXACT = 1.0
RIGHT_BUT_WORDY = 0.6
WRONG_BUT_BARE = 0.1


class ArithmeticOptions(Section):
    min: int = Field(1, ge=0, le=1_000_000)
    """Smallest operand."""
    max: int = Field(20, ge=0, le=1_000_000)
    """Largest operand."""
    operands: int = Field(2, ge=2, le=8)
    """Number of operands of each sum."""
    operators: list[Literal["+", "-", "*"]] = Field(default=["+"], min_length=1)
    """Operators, drawn at random; ``*`` binds tighter."""
    digit_score: float = Field(0.0, ge=0.0, le=0.5)
    """A wrong last number earns this times the share of its digits that are right, counted from the right."""
    size: int = Field(10_000, ge=1, le=10_000_000)
    """Number of prompts in the data set."""

    @model_validator(mode="after")
    def _check_range(self) -> "ArithmeticOptions":
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) must be at most max ({self.max})")
        return self


class ArithmeticTask:
    """Asks "What is 3 + 4? Reply with the number only."; prompt ``i`` depends only on the seed and ``i``."""

    def __init__(self, options: ArithmeticOptions, seed: int) -> None:
        self._options = options
        self._seed = seed

    def __len__(self) -> int:
        return self._options.size

    def __getitem__(self, index: int) -> Prompt:
        sum_ = self.sum(index)
        return Prompt(
            id=f"arithmetic-{index}",
            messages=({"role": "user", "content": f"What is {sum_}? Reply with the number only."},),
            data={"answer": int(evaluate(sum_)[0])},
        )

    def sum(self, index: int) -> str:
        """Return the sum of a prompt: ``"3 + 4"``."""
        if not 0 <= index < len(self):
            raise IndexError(f"prompt {index} of an arithmetic task with {len(self)}")
        options = self._options
        draw = random.Random(f"arithmetic-{self._seed}-{index}")  # a string seed is the same in every process
        sum_ = str(draw.randint(options.min, options.max))
        for _ in range(options.operands - 1):
            sum_ += f" {draw.choice(options.operators)} {draw.randint(options.min, options.max)}"
        return sum_

    def reward(self, prompt: Prompt, response: str) -> Reward:
        """Score 1 for exactly the number; 0.6 if it is the last number of a longer reply; 0.1 for a wrong bare number.

        The two partial scores make the task learnable from the start. An untrained small model rarely replies with the
        right bare number, but it does say "3 + 4 = 7". With a 0/1 reward the samples of most groups would have equal
        rewards, hence no gradient. The scores are ordered such that no detour pays: a right sum in words beats a wrong
        bare number, and the right bare number beats both. With ``task.options.digit_score`` a wrong number earns
        something for each right digit (112 for 122 is better than 99), so that the completions of a group differ even
        if few are right.

        Metrics: ``correct`` (the reply is the right number or ends with it), ``exact`` (it is the right number and
        nothing else).
        """
        answer = str(prompt.data["answer"])
        text = response.strip()
        bare = INTEGER.fullmatch(text) is not None
        exact = text == answer
        # Compare as text: int() refuses the thousands of digits that a model can produce.
        numbers = INTEGER_IN_TEXT.findall(text)
        right = exact or numbers[-1:] == [answer]
        if right:
            score = EXACT if exact else RIGHT_BUT_WORDY
        else:
            score = WRONG_BUT_BARE if bare else 0.0
            if self._options.digit_score and numbers:
                score += self._options.digit_score * share_of_digits(numbers[-1], answer)
        given = numbers[-1] if numbers else ""
        return Reward(score, {"correct": float(right), "exact": float(exact)}, answer if right else given)


def share_of_digits(number: str, answer: str) -> float:
    """Return the share of right digits, aligned at the units; 0 if only one of the numbers is negative.

    >>> share_of_digits("127", "137"), share_of_digits("37", "137"), share_of_digits("-7", "7")
    (0.6666666666666666, 0.6666666666666666, 0.0)
    """
    if number.startswith("-") != answer.startswith("-"):
        return 0.0
    pairs = zip(reversed(number.lstrip("-")), reversed(answer.lstrip("-")), strict=False)
    return sum(a == b for a, b in pairs) / max(len(number.lstrip("-")), len(answer.lstrip("-")))


def build(context: TaskContext) -> ArithmeticTask:
    """Make the task from ``task.options`` and ``train.seed``.

    Raises:
        ConfigError: wrong options, or ``task.path`` is set.
    """
    refuse_path(context)
    return ArithmeticTask(parse_options(context, ArithmeticOptions), context.seed)
