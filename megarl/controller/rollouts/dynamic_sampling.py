# SPDX-License-Identifier: Apache-2.0
"""Draw more prompts until enough of them have signal (DAPO's dynamic sampling, arXiv:2503.14476, section 3.2)."""

from collections.abc import Callable
from dataclasses import replace

from megarl.config import RunConfig
from megarl.controller.rollouts.rollout import Rollout


def draw_until_signal(draw: Callable[[int], Rollout], wanted: int, factor: int) -> Rollout:
    """Draw prompts until ``wanted`` of them have signal, or ``factor * wanted`` are drawn.

    Each draw takes as many prompts as are missing, so no prompt with signal is drawn in vain. Two draws of a step may
    hold the same prompt around the end of an epoch.

    Args:
        draw: function: number of prompts -> their scored completions. The prompts are the next ones of the stream.
        wanted: ``train.prompts_per_step``.
        factor: ``train.max_resample_factor``.

    Returns:
        All drawn prompts, of which ``wanted`` are to be trained on. If too few have signal, the first ones without
        signal are among them; ``updates.divide`` drops those.
    """
    rollout = draw(wanted)
    while (missing := wanted - sum(rollout.signals)) > 0 and (left := factor * wanted - len(rollout.prompts)) > 0:
        rollout = rollout.with_more(draw(min(missing, left)))
    # Stable: within both kinds, those drawn first come first.
    first = sorted(range(len(rollout.prompts)), key=lambda index: not rollout.signals[index])[:wanted]
    return replace(rollout, trained=sorted(first))


def dropped_groups(rollout: Rollout, config: RunConfig) -> set[int]:
    """Return the indices of the drawn prompts that ``loss.groups_without_signal`` drops."""
    keeps = config.loss.groups_without_signal == "keep"
    return set() if keeps else {index for index, signal in enumerate(rollout.signals) if not signal}
