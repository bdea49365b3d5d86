# SPDX-License-Identifier: Apache-2.0
"""Environment ``guessing``: find a number; after each guess the policy hears whether it is higher or lower."""

import random
import re
from typing import ClassVar

from pydantic import Field, model_validator

from megarl.config.base import Section
from megarl.environments.chat import Chat
from megarl.environments.client import Client, EpisodeLimit
from megarl.tasks.base import Reward, TaskContext
from megarl.tasks.options import parse_options, refuse_path
from megarl.types import Prompt, Trajectory

INTEGER = re.compile(r"[0-9]+")


class GuessingOptions(Section):
    min: int = Field(1, ge=0, le=1_000_000)
    """Smallest number."""
    max: int = Field(100, ge=0, le=1_000_000)
    """Largest number."""
    width: int = Field(10, ge=2, le=1_000_000)
    """How many numbers are possible in a game; each game has a range of its own."""
    guesses: int = Field(4, ge=1, le=64)
    """Guesses of an episode."""
    size: int = Field(10_000, ge=1, le=10_000_000)
    """Number of prompts in the data set."""

    @model_validator(mode="after")
    def _check_range(self) -> "GuessingOptions":
        if self.max - self.min + 1 < self.width:
            raise ValueError(f"width ({self.width}) exceeds the numbers from min ({self.min}) to max ({self.max})")
        return self


class Guessing:
    """Asks for a number that the policy can find by halving the interval that is left."""

    unfinished_metrics: ClassVar[dict[str, float]] = {"correct": 0.0}

    def __init__(self, options: GuessingOptions, seed: int) -> None:
        self._options, self._seed = options, seed

    def __len__(self) -> int:
        return self._options.size

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < len(self):
            raise IndexError(f"prompt {index} of a guessing game with {len(self)}")
        options, draw = self._options, random.Random(f"guessing-{self._seed}-{index}")
        low = draw.randint(options.min, options.max - options.width + 1)
        high = low + options.width - 1
        text = f"I think of a number from {low} to {high}. Guess it. Reply with the number only."
        data = {"number": draw.randint(low, high), "low": low, "high": high}
        return Prompt(f"guessing-{index}", ({"role": "user", "content": text},), data)

    async def rollout(self, prompt: Prompt, client: Client) -> Trajectory:
        """Play one game.

        The reward is 1 for the number, less 0.1 for each guess before it. Without it: half the share of the guesses
        that were within what the answers before had left, so that listening pays before the first game is won.

        Metrics: ``correct``, ``listened`` (that share).
        """
        number, chat, answers = prompt.data["number"], Chat(client), 0
        low, high, listened = prompt.data["low"], prompt.data["high"], 0
        try:
            for guess in range(self._options.guesses):
                said = (await chat.sample()).text
                answers = guess + 1
                value = read(said)
                if value is not None and low <= value <= high:
                    listened += 1
                if value == number:
                    share = listened / answers
                    return client.trajectory(Reward(1.0 - 0.1 * guess, {"correct": 1.0, "listened": share}))
                if value is None:
                    chat.add({"role": "user", "content": "Reply with one number."})
                elif value < number:
                    low = max(low, value + 1)
                    chat.add({"role": "user", "content": "Higher."})
                else:
                    high = min(high, value - 1)
                    chat.add({"role": "user", "content": "Lower."})
        except EpisodeLimit:
            pass
        share = listened / max(answers, 1)
        return client.trajectory(Reward(0.5 * share, {"correct": 0.0, "listened": share}))


def read(text: str) -> int | None:
    """Return the only number of a reply, or None.

    >>> read("7."), read("3 or 4"), read("nine")
    (7, None, None)
    """
    numbers = INTEGER.findall(text)
    # int() refuses the thousands of digits that a model can produce.
    return int(numbers[0]) if len(numbers) == 1 and len(numbers[0]) < 10 else None


def build(context: TaskContext) -> Guessing:
    """Make the environment from ``task.options`` and ``train.seed``.

    Raises:
        ConfigError: wrong options, or ``task.path`` is set.
    """
    refuse_path(context)
    return Guessing(parse_options(context, GuessingOptions), context.seed)
