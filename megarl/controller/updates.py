"""What one rollout does to the model: reference and old logprobs where needed, then one or more optimizer steps."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from megarl.config import RunConfig
from megarl.loss.aggregation import sequence_weights
from megarl.loss.base import Loss
from megarl.types import Sample

if TYPE_CHECKING:
    from megarl.model.megatron_model import MegatronModel


def run_updates(
    model: "MegatronModel", loss: Loss, config: RunConfig, samples: Sequence[Sample], rates: Sequence[float]
) -> dict[str, float]:
    """Train on one rollout; a collective over all ranks.

    A single on-policy update needs no old logprobs: the current ones, detached, are the same. With several updates
    they are computed once, before the first. Denominators are those of each update's own samples.

    Args:
        model: this rank's.
        loss: built from ``config.loss``.
        config: the run.
        samples: of the whole step, the completions of a prompt next to each other.
        rates: learning rate of each update.

    Returns:
        Metrics averaged over the updates; of those ending in ``_max``, the largest.
    """
    samples = list(samples)
    if config.loss.kl_coef > 0:
        reference = model.forward(model.pack(samples), adapter=False)
        samples = [dataclasses.replace(s, reference_logprobs=r) for s, r in zip(samples, reference, strict=True)]
    if len(rates) > 1:
        old = model.forward(model.pack(samples))
        samples = [dataclasses.replace(s, old_logprobs=o) for s, o in zip(samples, old, strict=True)]
    collected = []
    for part, rate in zip(split_groups(samples, len(rates), config.sampler.samples_per_prompt), rates, strict=True):
        counts = np.array([int(sample.response_mask.sum()) for sample in part])
        weights = sequence_weights(counts, config.loss.aggregation, config.sampler.max_response_tokens)
        metrics = model.forward_backward(model.pack(part, weights), loss)
        update = model.optim_step(rate)
        # Read only now: it waits for the device.
        collected.append({**metrics, **update})
    return combine(collected)


def split_groups(samples: Sequence[Sample], parts: int, group: int) -> list[list[Sample]]:
    """Cut a rollout into ``parts`` of nearly equal numbers of whole groups of ``group`` completions."""
    groups = [list(samples[i : i + group]) for i in range(0, len(samples), group)]
    return [
        [sample for index in chunk for sample in groups[index]]
        for chunk in np.array_split(np.arange(len(groups)), parts)
    ]


def combine(collected: Sequence[dict[str, float]]) -> dict[str, float]:
    """Average metrics over updates; maximum of those ending in ``_max``."""
    names = {name for metrics in collected for name in metrics}
    return {
        name: (max if name.endswith("_max") else lambda values: sum(values) / len(values))(
            [metrics[name] for metrics in collected if name in metrics]
        )
        for name in sorted(names)
    }
