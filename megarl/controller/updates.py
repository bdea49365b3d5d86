# SPDX-License-Identifier: Apache-2.0
"""Train on one rollout: compute reference and old logprobs if needed, then do one or more optimizer steps."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from megarl.config import RunConfig
from megarl.controller.adapters import reference_of
from megarl.loss.aggregation import sequence_weights
from megarl.loss.base import Loss
from megarl.types import Sample

if TYPE_CHECKING:
    from megarl.model.megatron_model import MegatronModel
    from megarl.model.step.packing import PackedBatch


def run_updates(
    model: "MegatronModel", loss: Loss, config: RunConfig, samples: Sequence[Sample], rates: Sequence[float]
) -> dict[str, float]:
    """Train on one rollout; a collective over all ranks.

    A single on-policy update needs no old logprobs, since they equal the current ones, detached. Several updates need
    them; they are computed once, before the first update. Dropout always needs them: the tokens were not drawn from the
    policy with dropout, so ``exp(logprob with dropout - old logprob)`` is its importance ratio. Each update's
    denominators are those of its own samples. Micro-batches are planned once, for all passes.

    Args:
        model: this rank's model.
        loss: the loss built from ``config.loss``.
        config: the run's config.
        samples: samples of the whole step; the completions of a prompt are next to each other.
        rates: learning rate of each update.

    Returns:
        Metrics averaged over the updates; for names ending in ``_max``, the largest value.
    """
    parts = split_groups(samples, len(rates), config.sampler.samples_per_prompt)
    batches = [plan(model, config, part) for part in parts]
    if config.loss.kl_coef > 0:
        adapter = reference_of(config)
        batches = [b.with_logprobs("reference_logprobs", model.forward(b, adapter=adapter)) for b in batches]
    if len(rates) > 1 or model.adapter.dropout > 0:
        batches = [batch.with_logprobs("old_logprobs", model.forward(batch)) for batch in batches]
    collected = []
    for batch, rate in zip(batches, rates, strict=True):
        trains = needs_backward(loss, config, batch.samples)
        metrics = model.forward_backward(batch, loss) if trains else model.evaluate(batch, loss)
        update = model.optim_step(rate)
        # Read last, because this waits for the device.
        collected.append({**metrics, **update, "skipped_backward": float(not trains)})
    return combine(collected)


def needs_backward(loss: Loss, config: RunConfig, samples: Sequence[Sample]) -> bool:
    """Return True if the gradient may differ from zero; see ``Loss.zero_without_advantages``."""
    vanishes = getattr(loss, "zero_without_advantages", False) and config.loss.kl_coef == 0
    return not vanishes or any(sample.has_signal for sample in samples)


def plan(model: "MegatronModel", config: RunConfig, samples: Sequence[Sample]) -> "PackedBatch":
    """Plan the micro-batches and token weights of one update."""
    counts = np.array([int(sample.response_mask.sum()) for sample in samples])
    weights = sequence_weights(counts, config.loss.aggregation, config.sampler.max_response_tokens)
    return model.pack(samples, weights)


def split_groups(samples: Sequence[Sample], parts: int, group: int) -> list[list[Sample]]:
    """Split a rollout into ``parts`` with nearly equal numbers of whole groups of ``group`` completions."""
    groups = [list(samples[i : i + group]) for i in range(0, len(samples), group)]
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
