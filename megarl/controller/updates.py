# SPDX-License-Identifier: Apache-2.0
"""Train on one rollout: compute reference and old logprobs if needed, then do one or more optimizer steps."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from megarl.config import RunConfig
from megarl.controller.actors.adapters import reference_of
from megarl.controller.actors.updates import groups_of
from megarl.types import Sample


class Trainer(Protocol):
    """All ranks of the trainer, or the only one; see ``RankTrainer``."""

    def forward(self, samples: Sequence[Sample], adapter: bool | str = True) -> list[np.ndarray]:
        """Return the logprobs of the samples' response tokens."""
        ...

    def forward_backward(self, samples: Sequence[Sample], others: Sequence[int] = (), last: bool = True) -> None:
        """Add the gradient of samples to that of the optimizer step."""
        ...

    def optim_step(self, rate: float) -> dict[str, float]:
        """Update the adapter once; return the metrics of what was added."""
        ...


def run_updates(
    trainer: Trainer, config: RunConfig, samples: Sequence[Sample], rates: Sequence[float]
) -> dict[str, float]:
    """Train on one rollout.

    A single on-policy update needs no old logprobs, since they equal the current ones, detached. Several updates need
    them; they are computed before the first update. Each update's denominators are those of its own samples.

    Args:
        trainer: the trainer.
        config: the run's config.
        samples: samples of the whole step, each with its group; those of a prompt are next to each other.
        rates: learning rate of each update.

    Returns:
        Metrics averaged over the updates; for names ending in ``_max``, the largest value.
    """
    parts = split_groups(samples, len(rates))
    if config.loss.kl_coef > 0:
        parts = [_with(part, "reference_logprobs", trainer.forward(part, reference_of(config))) for part in parts]
    if len(rates) > 1:
        parts = [_with(part, "old_logprobs", trainer.forward(part)) for part in parts]
    metrics = []
    for part, rate in zip(parts, rates, strict=True):
        trainer.forward_backward(part)
        metrics.append(trainer.optim_step(rate))
    return combine(metrics)


def split_groups(samples: Sequence[Sample], parts: int) -> list[list[Sample]]:
    """Split a rollout into ``parts`` with nearly equal numbers of whole groups."""
    groups = groups_of(samples)
    return [
        [sample for index in chunk for sample in groups[index]]
        for chunk in np.array_split(np.arange(len(groups)), parts)
    ]


def combine(collected: Sequence[dict[str, float]]) -> dict[str, float]:
    """Average metrics over updates; for names ending in ``_max``, take the maximum."""
    names = {name for metrics in collected for name in metrics}
    return {
        name: (max if name.endswith("_max") else lambda values: sum(values) / len(values))(
            [metrics[name] for metrics in collected if name in metrics]
        )
        for name in sorted(names)
    }


def _with(samples: Sequence[Sample], name: str, values: Sequence[np.ndarray]) -> list[Sample]:
    """Return the samples with one field of each replaced."""
    changes: list[dict[str, Any]] = [{name: value} for value in values]
    return [dataclasses.replace(one, **change) for one, change in zip(samples, changes, strict=True)]
