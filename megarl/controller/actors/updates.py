# SPDX-License-Identifier: Apache-2.0
"""Train on one rollout: compute reference and old logprobs if needed, then do one or more optimizer steps."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from megarl.config import RunConfig
from megarl.controller.actors.adapters import reference_of
from megarl.loss.aggregation import sequence_weights
from megarl.loss.base import Loss
from megarl.types import Sample

if TYPE_CHECKING:
    from megarl.model.megatron_model import MegatronModel
    from megarl.model.step.packing import PackedBatch


@dataclass(frozen=True)
class Update:
    """The packed samples of one optimizer step.

    Attributes:
        trained: samples with a forward and a backward pass; None if there are none.
        measured: samples with a forward pass only, for the metrics; None if there are none.
    """

    trained: "PackedBatch | None"
    measured: "PackedBatch | None"

    def with_logprobs(self, name: str, compute: "Callable[[PackedBatch], list[np.ndarray]]") -> "Update":
        """Return the same update with one field of every sample computed; see ``PackedBatch.with_logprobs``."""
        trained, measured = (
            None if batch is None else batch.with_logprobs(name, compute(batch))
            for batch in (self.trained, self.measured)
        )
        return Update(trained, measured)

    def run(self, model: "MegatronModel", loss: Loss, rate: float) -> dict[str, float]:
        """Compute metrics and gradient, and do the optimizer step; return the metrics of all samples together."""
        passes = []
        if self.measured is not None:
            passes.append(model.evaluate(self.measured, loss))
        if self.trained is not None:
            passes.append(model.forward_backward(self.trained, loss))
        stepped = model.optim_step(rate)
        # Read last, because this waits for the device.
        return {**total(passes), **stepped, "skipped_backward": float(self.trained is None)}


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
        samples: samples of the whole step, each with its group; those of a prompt are next to each other.
        rates: learning rate of each update.

    Returns:
        Metrics averaged over the updates; for names ending in ``_max``, the largest value.
    """
    parts = split_groups(samples, len(rates))
    updates = [plan_update(model, loss, config, part) for part in parts]
    if config.loss.kl_coef > 0:
        reference = partial(model.forward, adapter=reference_of(config))
        updates = [update.with_logprobs("reference_logprobs", reference) for update in updates]
    if len(rates) > 1 or model.adapter.dropout > 0:
        updates = [update.with_logprobs("old_logprobs", model.forward) for update in updates]
    return combine([update.run(model, loss, rate) for update, rate in zip(updates, rates, strict=True)])


def plan_update(model: "MegatronModel", loss: Loss, config: RunConfig, samples: Sequence[Sample]) -> Update:
    """Plan one update: choose the samples that need a backward pass, and pack both kinds."""
    trained, measured = divide(samples, loss, config)
    return Update(
        plan(model, config, trained, measured) if trained else None,
        plan(model, config, measured, trained) if measured else None,
    )


def divide(samples: Sequence[Sample], loss: Loss, config: RunConfig) -> tuple[list[Sample], list[Sample]]:
    """Split the samples of an update into those to train on, and those whose gradient is zero.

    Unless ``loss.groups_without_signal`` is ``keep``, groups whose advantages are all 0 are in neither list. If they
    are all groups of the update, they are in the second one: nothing is trained, and the metrics are those of all.
    """
    if config.loss.groups_without_signal != "keep":
        kept = [sample for group in groups_of(samples) if any(s.has_signal for s in group) for sample in group]
        if not kept:
            return [], list(samples)
        samples = kept
    if config.loss.kl_coef > 0 or not getattr(loss, "zero_without_advantages", False):
        return list(samples), []
    return [s for s in samples if s.has_signal], [s for s in samples if not s.has_signal]


def plan(
    model: "MegatronModel", config: RunConfig, samples: Sequence[Sample], others: Sequence[Sample] = ()
) -> "PackedBatch":
    """Plan the micro-batches and token weights of samples; denominators count the update's ``others`` too."""
    counts = np.array([int(sample.response_mask.sum()) for sample in (*samples, *others)])
    weights = sequence_weights(counts, config.loss.aggregation, config.sampler.max_response_tokens)
    return model.pack(samples, weights[: len(samples)], int(counts.sum()))


def groups_of(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Return the samples of each prompt, which are next to each other."""
    return [list(group) for _, group in itertools.groupby(samples, key=lambda sample: sample.group)]


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


def total(passes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Add up the metrics of an update's passes; for names ending in ``_max``, take the maximum."""
    names = {name for metrics in passes for name in metrics}
    return {
        name: (max if name.endswith("_max") else sum)(metrics[name] for metrics in passes if name in metrics)
        for name in sorted(names)
    }
