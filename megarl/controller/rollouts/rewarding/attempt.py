# SPDX-License-Identifier: Apache-2.0
"""Keep the books of one attempt to score completions: what was sent, what runs, what came back."""

import time
from collections.abc import Sequence

from megarl.controller.rollouts.rewarding.scoring import Group, Place
from megarl.errors import MegarlError
from megarl.tasks.base import Reward

# A completion: index of its group, and its index there.
Spot = tuple[int, int]
# Calls that have begun: their place, the prompt's id, and since when, monotonic seconds.
Running = dict[Place, tuple[str, float]]


class Attempt:
    """Some completions of some groups.

    Places are those of the batch that is sent; spots are those of all groups.

    Attributes:
        batch: the groups that are sent, each with the completions that are asked for.
        running: calls that have begun and not ended.
        results: rewards so far.
        failed: completions whose call failed, with the error.
    """

    def __init__(self, groups: Sequence[Group], spots: Sequence[Spot]) -> None:
        """
        Args:
            groups: all groups.
            spots: the completions to score, in order.
        """
        chosen: dict[int, list[int]] = {}
        for index, number in spots:
            chosen.setdefault(index, []).append(number)
        self._chosen = list(chosen.items())
        self.batch = [(groups[index][0], [groups[index][1][n] for n in numbers]) for index, numbers in self._chosen]
        self.running: Running = {}
        self.results: dict[Spot, Reward] = {}
        self.failed: dict[Spot, MegarlError] = {}

    def begin(self, place: Place, name: str) -> None:
        """Note that a call has begun."""
        self.running[place] = (name, time.monotonic())

    def end(self, place: Place, rewards: Sequence[Reward]) -> None:
        """Note the rewards of a call."""
        self.running.pop(place)
        self.results.update(zip(self._spots(place), rewards, strict=True))

    def fail(self, place: Place, error: MegarlError) -> None:
        """Note that a call failed."""
        self.running.pop(place)
        self.failed.update(dict.fromkeys(self._spots(place), error))

    def late(self, seconds: float) -> Running:
        """Return the calls that have run for longer than ``seconds``."""
        latest = time.monotonic() - seconds
        return {place: (name, since) for place, (name, since) in self.running.items() if since < latest}

    def _spots(self, place: Place) -> list[Spot]:
        index, numbers = self._chosen[place[0]]
        return [(index, numbers[number]) for number in place[1]]
