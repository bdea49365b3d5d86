# SPDX-License-Identifier: Apache-2.0
"""Compute the learning rate as a pure function of the update, so that a resume needs no scheduler state."""

import math

from megarl.config import TrainConfig


def learning_rate(update: int, config: TrainConfig) -> float:
    """Return the learning rate of one optimizer step.

    Args:
        update: number of optimizer steps before it.
        config: gives peak, warmup, shape and length of the run.
    """
    total, warmup = (steps * config.updates_per_step for steps in (config.steps, config.warmup_steps))
    if update < warmup:
        return config.learning_rate * (update + 1) / warmup
    progress = (update - warmup) / max(total - warmup, 1)
    factor = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[config.schedule]
    return config.learning_rate * max(factor, 0.0)
