# SPDX-License-Identifier: Apache-2.0
"""Turn what a reward function or an environment gives into a checked ``Reward``."""

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np

from megarl.errors import RewardError, nearest
from megarl.tasks.base import Reward
from megarl.types import LARGEST_REWARD, Prompt


class Verdicts:
    """Checks verdicts: numbers, ``Reward``s, or dictionaries of components that have weights."""

    def __init__(self, said: str, weights: Mapping[str, float]) -> None:
        """
        Args:
            said: who gives them, for messages (``"task.reward reward.py:score"``).
            weights: of the components, if verdicts are dictionaries (``task.reward_weights``).
        """
        self._said, self._weights = said, dict(weights)

    def reward(self, verdict: Any, prompt: Prompt) -> Reward:
        """Return the verdict on one completion as a checked ``Reward``."""
        if isinstance(verdict, Mapping):
            return self._weighted(verdict, prompt)
        if self._weights:
            raise RewardError(
                f"task.reward_weights is set, but {self._said} returned {verdict!r} for prompt "
                f"'{prompt.id}'; return a dictionary of components, or remove the weights"
            )
        if not isinstance(verdict, Reward):
            verdict = Reward(verdict)
        return Reward(
            self._finite("the score", verdict.score, prompt),
            {key: self._finite(f"metric '{key}'", value, prompt) for key, value in verdict.metrics.items()},
            verdict.answer,
        )

    def _weighted(self, components: Mapping[str, Any], prompt: Prompt) -> Reward:
        """Return the weighted sum, with each component as a metric."""
        said = f"{self._said} for prompt '{prompt.id}'"
        for name in components:
            if name not in self._weights:
                raise RewardError(
                    f"{said} returned component '{name}', which has no weight{nearest(str(name), self._weights)}; set "
                    f"task.reward_weights.{name}"
                )
        for name in self._weights:
            if name not in components:
                raise RewardError(
                    f"{said} returned no component '{name}'{nearest(name, map(str, components))}; return it, or remove "
                    f"task.reward_weights.{name}"
                )
        values = {name: self._finite(f"component '{name}'", value, prompt) for name, value in components.items()}
        score = sum(self._weights[name] * value for name, value in values.items())
        return Reward(self._finite("the score", score, prompt), values)

    def _finite(self, label: str, value: Any, prompt: Prompt) -> float:
        # Real covers bool, int, float and NumPy's numbers. Anything else (str, None, a tensor) is a mistake.
        if not isinstance(value, Real | np.bool_):
            raise RewardError(
                f"{self._said} returned {value!r} ({type(value).__name__}) as {label} for prompt "
                f"'{prompt.id}'; return a float or a megarl.tasks.Reward"
            )
        try:
            number = float(value)
        except OverflowError:  # an integer
            number = math.inf
        if not abs(number) <= LARGEST_REWARD:
            raise RewardError(
                f"{self._said} returned {number!r} as {label} for prompt '{prompt.id}'; it must be finite "
                f"and within +-{LARGEST_REWARD:g}"
            )
        return number
