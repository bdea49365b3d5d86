# SPDX-License-Identifier: Apache-2.0
"""Compute the advantages of a group of completions that answer the same prompt."""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from megarl.config import LossConfig
from megarl.errors import LossInputError
from megarl.plugins import pick_or_load
from megarl.types import LARGEST_REWARD

# Prevents large advantages in a group whose rewards differ only by rounding. TRL uses the same value.
EPSILON = 1e-4


def group_advantages(rewards_G: np.ndarray, scale: Literal["std", "none"]) -> np.ndarray:
    """Return the advantages ``[G]`` float32 of one group: each reward minus the group's mean, scaled.

    Args:
        rewards_G: ``[G]`` float64 rewards of the completions of one prompt.
        scale: ``"std"`` divides by the group's standard deviation + 1e-4 (GRPO, DeepSeekMath arXiv:2402.03300,
            section 4.1.2). The paper leaves the estimator open; this is the sample one (``ddof=1``), as in TRL and
            verl, so that a recipe's learning rate carries over. ``"none"`` only centres: dividing by the deviation
            favours prompts whose rewards hardly differ (Dr. GRPO, arXiv:2503.20783, section 3.1).

    Returns:
        ``[G]`` float32; exactly 0 where all rewards are equal (and for a group of one).

    Raises:
        LossInputError: ``rewards_G`` is not a vector of at least one reward, a reward is not finite or beyond +-1e38,
            or ``scale`` is unknown.
    """
    rewards_G = np.asarray(rewards_G, dtype=np.float64)
    if rewards_G.ndim != 1 or not rewards_G.size:
        raise LossInputError(f"rewards_G has shape {rewards_G.shape}; it must be a vector of at least one reward")
    if not np.isfinite(rewards_G).all():
        raise LossInputError(f"rewards_G holds a reward that is not finite: {rewards_G.tolist()}")
    if scale not in ("std", "none"):
        raise LossInputError(f"loss.advantage_scale is '{scale}'; it must be 'std' or 'none'")
    if np.abs(rewards_G).max() > LARGEST_REWARD and (rewards_G != rewards_G[0]).any():
        raise LossInputError(f"rewards_G holds a reward beyond +-{LARGEST_REWARD:g}: {rewards_G.tolist()}")
    # Subtract the first reward, which is exact for close rewards. Subtracting the mean is not: the mean of equal
    # numbers may differ from them in the last bit, and a tolerance would discard small signals.
    centred_G = rewards_G - rewards_G[0]
    centred_G -= centred_G.mean()
    if scale == "std" and len(rewards_G) > 1:
        centred_G = centred_G / (centred_G.std(ddof=1) + EPSILON)
    return centred_G.astype(np.float32)


def leave_one_out(rewards_G: np.ndarray) -> np.ndarray:
    """Return each reward minus the mean of the group's others, ``[G]`` float32 (RLOO, arXiv:2402.14740).

    Raises:
        LossInputError: as ``group_advantages``, or a group of one.
    """
    if len(rewards_G) < 2:
        raise LossInputError("loss.advantage is 'rloo', which needs sampler.samples_per_prompt of at least 2 (it is 1)")
    count = len(rewards_G)
    return (group_advantages(rewards_G, "none") * (count / (count - 1))).astype(np.float32)


# Name in ``loss.advantage`` -> function: (rewards ``[G]`` float64 of one prompt, the ``loss`` section) -> advantages.
Advantages = Sequence[float | np.ndarray] | np.ndarray
ADVANTAGES: dict[str, Callable[[np.ndarray, LossConfig], Advantages]] = {
    "group": lambda rewards_G, config: group_advantages(rewards_G, config.advantage_scale),
    "none": lambda rewards_G, config: rewards_G.astype(np.float32),
    "rloo": lambda rewards_G, config: leave_one_out(rewards_G),
}


def build_advantages(config: LossConfig) -> Callable[[np.ndarray], Advantages]:
    """Return the function that ``loss.advantage`` names, from a group's rewards to its advantages.

    Raises:
        ConfigError: no such function; the message lists the registered names.
    """
    function = pick_or_load(ADVANTAGES, config.advantage, "advantage", "loss.advantage")

    def checked(rewards_G: np.ndarray) -> Advantages:
        advantages = function(rewards_G, config)
        if len(advantages) != len(rewards_G):
            raise LossInputError(
                f"loss.advantage '{config.advantage}' returned {len(advantages)} advantages for {len(rewards_G)} "
                "rewards; return one entry for each: a number, or a float32 [R] array"
            )
        return advantages

    return checked
