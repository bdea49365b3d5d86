# SPDX-License-Identifier: Apache-2.0
"""Do a trainer rank's share of a step: logprobs, gradients, and the optimizer step, in calls of their own."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megarl.config import RunConfig
from megarl.errors import MegarlError
from megarl.loss.aggregation import sequence_weights
from megarl.loss.base import Loss
from megarl.types import Sample

if TYPE_CHECKING:
    from megarl.model.step.packing import PackedBatch
    from megarl.model.trained_model import TrainedModel


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

    def logprobs(self, compute: "Callable[[PackedBatch], list[np.ndarray]]") -> dict[int, np.ndarray]:
        """Return the logprobs of each sample, by ``id(sample)``."""
        batches = [batch for batch in (self.trained, self.measured) if batch is not None]
        return {id(one): value for batch in batches for one, value in zip(batch.samples, compute(batch), strict=True)}

    @property
    def has_old_logprobs(self) -> bool:
        """True if the trained samples say what their logprobs were."""
        return self.trained is None or all(one.old_logprobs is not None for one in self.trained.samples)


class RankTrainer:
    """One rank of the trainer; every method is a collective over all ranks, with the same arguments.

    Gradients and metrics of several calls of ``forward_backward`` add up until ``optim_step``.

    Args:
        model: this rank's model.
        loss: the loss built from ``config.loss``.
        config: the run's config.
    """

    def __init__(self, model: "TrainedModel", loss: Loss, config: RunConfig) -> None:
        self._model, self._loss, self._config = model, loss, config
        self._passes: list[Mapping[str, float]] = []
        self._trained = self._failed = False

    def forward(self, samples: Sequence[Sample], adapter: bool | str = True) -> list[np.ndarray]:
        """Return the logprobs of the samples' response tokens, float32 ``[R]`` each, without gradient and dropout.

        The micro-batches are those of ``forward_backward`` for the same samples, so that its logprobs are the same bit
        by bit as long as the weights are.

        Args:
            samples: each with its group; those of a prompt are next to each other.
            adapter: as for ``TrainedModel.forward``.
        """
        update = plan_update(self._model, self._loss, self._config, samples)
        found = update.logprobs(lambda batch: self._model.forward(batch, adapter=adapter))
        if left := [sample for sample in samples if id(sample) not in found]:  # groups that are dropped
            values = self._model.forward(self._model.pack(left), adapter=adapter)
            found |= {id(sample): value for sample, value in zip(left, values, strict=True)}
        return [found[id(sample)] for sample in samples]

    def forward_backward(self, samples: Sequence[Sample], others: Sequence[int] = (), last: bool = True) -> None:
        """Add the gradient of samples to that of the optimizer step. ``optim_step`` returns the metrics.

        With dropout, samples without old logprobs get them first: the tokens were not drawn from the policy with
        dropout, so ``exp(logprob with dropout - old logprob)`` is their importance ratio.

        Args:
            samples: as for ``forward``.
            others: number of response tokens of each sample that other calls add to the same optimizer step. The
                denominators count them.
            last: False if more calls of this optimizer step follow.
        """
        self._failed, failed = True, self._failed
        if failed:
            raise MegarlError("forward_backward failed before, so a part of the gradient is missing")
        update = plan_update(self._model, self._loss, self._config, samples, others)
        if self._model.adapter.dropout > 0 and not update.has_old_logprobs:
            update = update.with_logprobs("old_logprobs", self._model.forward)
        if update.measured is not None:
            self._passes.append(self._model.evaluate(update.measured, self._loss))
        if update.trained is not None:
            self._passes.append(self._model.forward_backward(update.trained, self._loss, last=last))
        self._trained = self._trained or update.trained is not None
        self._failed = False

    def optim_step(self, rate: float) -> dict[str, float]:
        """Update the adapter once with a learning rate; return the metrics of all samples together.

        Raises:
            MegarlError: a ``forward_backward`` of this step failed. Nothing was updated.
            GradientError: see ``TrainedModel.optim_step``.
        """
        if self._failed:
            raise MegarlError("forward_backward failed, so nothing is updated")
        stepped = self._model.optim_step(rate)
        passes, skipped = self._passes, not self._trained
        self._passes, self._trained = [], False
        # Read last, because this waits for the device.
        return {**total(passes), **stepped, **self._model.measured(), "skipped_backward": float(skipped)}


def plan_update(
    model: "TrainedModel", loss: Loss, config: RunConfig, samples: Sequence[Sample], others: Sequence[int] = ()
) -> Update:
    """Plan a pass: choose the samples that need a backward pass, and pack both kinds. Micro-batches are planned once.

    Args:
        model, loss, config: see ``RankTrainer``.
        samples: each with its group; those of a prompt are next to each other.
        others: response tokens of the optimizer step's other samples.
    """
    trained, measured = divide(samples, loss, config)
    return Update(
        plan(model, config, trained, [*tokens_of(measured), *others]) if trained else None,
        plan(model, config, measured, [*tokens_of(trained), *others]) if measured else None,
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
    model: "TrainedModel", config: RunConfig, samples: Sequence[Sample], others: Sequence[int] = ()
) -> "PackedBatch":
    """Plan the micro-batches and token weights of samples; denominators count the step's ``others`` too."""
    counts = np.array([*tokens_of(samples), *others])
    weights = sequence_weights(counts, config.loss.aggregation, config.sampler.max_response_tokens)
    return model.pack(samples, weights[: len(samples)], int(counts.sum()))


def tokens_of(samples: Sequence[Sample]) -> list[int]:
    """Return the number of response tokens of each sample."""
    return [int(sample.response_mask.sum()) for sample in samples]


def groups_of(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Return the samples of each prompt, which are next to each other."""
    return [list(group) for _, group in itertools.groupby(samples, key=lambda sample: sample.group)]


def total(passes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Add up the metrics of an update's passes; for names ending in ``_max``, take the maximum."""
    names = {name for metrics in passes for name in metrics}
    return {
        name: (max if name.endswith("_max") else sum)(metrics[name] for metrics in passes if name in metrics)
        for name in sorted(names)
    }
