# SPDX-License-Identifier: Apache-2.0
"""Pack samples into micro-batches. The plan is pure and the same on every rank; ``micro_batch`` makes tensors of it.

A sequence of L tokens feeds its first L - 1 tokens and predicts its last L - 1: the output at the last token is not
used. Under context parallelism (CP) each sequence is padded at its end and spread over the CP ranks (see ``zigzag``). A
response token, with its label and all that the loss needs of it, belongs to the rank that is fed the token before it.

Shape letters: T packed input tokens of a micro-batch on this rank, S sequences, R response tokens on this rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from megarl.errors import DataError
from megarl.model.layers.attention.zigzag import padded_length
from megarl.model.layers.sequence_work import BY_TOKENS, SequenceWork
from megarl.model.step.bins import deal, plan_bins
from megarl.types import Sample


@dataclass(frozen=True)
class PackedBatch:
    """A global batch: its samples, the weight of their tokens, and the plan of micro-batches per DP rank.

    Attributes:
        samples: all samples of the batch, the same on every rank.
        weights_S: weight in the loss of each response token of sample s, float64 (see ``loss.aggregation``).
        token_fraction: 1 / (response tokens of the whole step).
        plan: ``plan[data_rank][micro_batch]`` lists sample indices. Every rank has the same number of micro-batches.
        multiple: T is padded to a multiple of this.
        context: CP size that the plan is made for.
    """

    samples: tuple[Sample, ...]
    weights_S: np.ndarray
    token_fraction: float
    plan: tuple[tuple[tuple[int, ...], ...], ...]
    multiple: int
    context: int = 1

    @cached_property
    def response_tokens(self) -> np.ndarray:
        """Number of response tokens of each sample, int64 ``[S]``."""
        return np.array([int(sample.response_mask.sum()) for sample in self.samples])

    def with_logprobs(self, name: str, logprobs: Sequence[np.ndarray]) -> "PackedBatch":
        """Return the same plan with one field of every sample replaced.

        Args:
            name: ``"old_logprobs"`` or ``"reference_logprobs"``.
            logprobs: float32 ``[R]`` per sample, in the batch's order.
        """
        changes: list[dict[str, Any]] = [{name: values} for values in logprobs]
        samples = tuple(replace(sample, **change) for sample, change in zip(self.samples, changes, strict=True))
        return replace(self, samples=samples)


def pack(
    samples: Sequence[Sample],
    weights_S: np.ndarray | None,
    *,
    max_tokens: int,
    data: int = 1,
    pipeline: int = 1,
    virtual_pipeline: int = 1,
    context: int = 1,
    multiple: int = 1,
    step_tokens: int | None = None,
    work: SequenceWork = BY_TOKENS,
) -> PackedBatch:
    """Plan the micro-batches of a global batch.

    Args:
        samples: the batch.
        weights_S: float64 weight of each sample's tokens over the whole step; None for passes without a loss.
        max_tokens: token budget of a micro-batch over all CP ranks, counting the padding of each sequence.
        data, pipeline: parallel sizes. Every DP rank gets the same number of micro-batches; at least ``pipeline`` if
            there are enough samples, so that the pipeline fills.
        virtual_pipeline: above 1, the number of micro-batches is a multiple of ``pipeline``, which the interleaved
            schedule requires.
        context: CP size.
        multiple: pad T to a multiple of this (the tensor-parallel size under SP).
        step_tokens: response tokens of the whole step, if the batch is a part of it.
        work: cost model by which micro-batches and ranks are balanced; default: the number of tokens.

    Raises:
        DataError: there are no samples, a sample exceeds the budget, or the weights do not match the samples.
    """
    if not samples:
        raise DataError("a batch needs at least one sample")
    weights = np.zeros(len(samples)) if weights_S is None else np.asarray(weights_S, dtype=np.float64)
    if weights.shape != (len(samples),):
        raise DataError(f"weights_S has shape {weights.shape}, but there are {len(samples)} samples")
    lengths = [padded_length(len(sample.tokens) - 1, context) for sample in samples]
    for index, length in enumerate(lengths):
        if length > max_tokens:
            padded = f" (padded for parallel.context = {context})" if context > 1 else ""
            raise DataError(
                f"sample {index} feeds {length} tokens{padded}, more than train.micro_batch_tokens ({max_tokens}); "
                "raise it"
            )
    responses = [int(sample.response_mask.sum()) for sample in samples]
    total = step_tokens or sum(responses)
    rounds = pipeline if virtual_pipeline > 1 else 1
    costs = [work.of(*counts) for counts in zip(lengths, responses, strict=True)]
    bins = plan_bins(lengths, costs, max_tokens, groups=data * rounds, at_least=pipeline // rounds)
    plan = tuple(tuple(tuple(sorted(b)) for b in rank) for rank in deal(bins, costs, data))
    return PackedBatch(tuple(samples), weights, 1.0 / max(total, 1), plan, multiple, context)


def check_ids(samples: Sequence[Sample], vocab_size: int | None) -> None:
    """Refuse tokens that are not in the vocabulary: under tensor parallelism they would be embedded as zeros.

    Raises:
        DataError: the message names the sample and the token.
    """
    for index, sample in enumerate(samples):
        if len(sample.tokens) and (sample.tokens.min() < 0 or sample.tokens.max() >= (vocab_size or np.inf)):
            wrong = next(int(token) for token in sample.tokens if not 0 <= token < (vocab_size or np.inf))
            raise DataError(
                f"sample {index} holds token {wrong}, but the model's vocab_size is {vocab_size}; was it tokenised for "
                "another model?"
            )


def split_by_sample(flat: np.ndarray, batch: PackedBatch) -> list[np.ndarray]:
    """Cut a vector over all response tokens of a batch, in sample order, into one array per sample."""
    return np.split(flat, np.cumsum(batch.response_tokens)[:-1])


def flat_offsets(batch: PackedBatch) -> np.ndarray:
    """Return each sample's first position in the vector over all response tokens of the batch: int64 ``[S]``."""
    counts = batch.response_tokens
    return np.cumsum(counts) - counts
