"""The learning rate as a pure function of the update: nothing to save, nothing to lose on resume."""

import math

from megarl.config import TrainConfig


def learning_rate(update: int, config: TrainConfig) -> float:
    """Learning rate of one optimizer step.

    Args:
        update: number of optimizer steps made before it.
        config: peak, warmup, shape and length of the run.
    """
    total = config.steps * config.updates_per_step
    if update < config.warmup_steps:
        return config.learning_rate * (update + 1) / config.warmup_steps
    progress = (update - config.warmup_steps) / max(total - config.warmup_steps, 1)
    factor = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[config.schedule]
    return config.learning_rate * max(factor, 0.0)
