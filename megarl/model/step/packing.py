# SPDX-License-Identifier: Apache-2.0
"""Pack samples into micro-batches. The plan is pure and the same on every rank; each rank makes tensors of its share.

A sequence of L tokens feeds its first L - 1 tokens and predicts its last L - 1: the output at the last token is not
used. Under context parallelism (CP) each sequence is padded at its end and spread over the CP ranks (see ``zigzag``). A
response token, with its label and all that the loss needs of it, belongs to the rank that is fed the token before it.

Shape letters: T packed input tokens of a micro-batch on this rank, S sequences, R response tokens on this rank.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from megarl.errors import DataError
from megarl.loss.base import TokenBatch
from megarl.loss.sequences import Sequences
from megarl.model.layers.attention.core import PackedSequences
from megarl.model.layers.attention.zigzag import padded_length, rank_tokens
from megarl.model.layers.sequence_work import BY_TOKENS, SequenceWork
from megarl.model.step.bins import deal, plan_bins
from megarl.types import Sample


@dataclass(frozen=True)
class MicroBatch:
    """This rank's part of one packed micro-batch, on the device.

    Attributes:
        tokens_T: int64 inputs. Padding lies at the end of each sequence (CP), and at the end of the pack as a sequence
            of its own. No other token attends to it.
        positions_T: int64, position of each token within its sequence.
        packed: the sequences' bounds, for attention.
        response_R: packed positions whose next token the policy chose, int64.
        labels_R: those next tokens, int64.
        places_R: positions of those tokens in the vector over all response tokens of the batch, int64 (see
            ``flat_offsets``).
        loss_tokens: per-token inputs of the loss.
        samples: index in the batch of each sequence of the whole pack; the pack's padding comes after them.
    """

    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    packed: PackedSequences
    response_R: torch.Tensor
    labels_R: torch.Tensor
    places_R: torch.Tensor
    loss_tokens: TokenBatch
    samples: tuple[int, ...]


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


def micro_batches(
    batch: PackedBatch, data_rank: int, device: torch.device, *, context_rank: int = 0
) -> list[MicroBatch]:
    """Return the tensors of one rank's part of its micro-batches, in order."""
    return [_assemble(batch, indices, context_rank, device) for indices in batch.plan[data_rank]]


def _assemble(batch: PackedBatch, indices: tuple[int, ...], context_rank: int, device: torch.device) -> MicroBatch:
    chosen = [batch.samples[index] for index in indices]
    lengths = _padded_lengths(batch, chosen)
    starts = np.cumsum([0, *lengths])
    tokens = np.zeros(starts[-1], dtype=np.int64)
    for start, sample in zip(starts, chosen, strict=False):
        tokens[start : start + len(sample.tokens) - 1] = sample.tokens[:-1]
    positions = np.concatenate([np.arange(length) for length in lengths])
    held = rank_tokens(lengths, batch.context, context_rank)
    here = np.full(len(tokens), -1)
    here[held] = np.arange(len(held))
    # For all response tokens of the micro-batch, in sample order: their position on this rank (-1: elsewhere), and the
    # indices of those that are here.
    response = here[_joined([s + np.flatnonzero(c.response_mask[1:]) for s, c in zip(starts, chosen, strict=False)])]
    kept = np.flatnonzero(response >= 0)
    offsets, counts = flat_offsets(batch), batch.response_tokens
    places = _joined([np.arange(offsets[index], offsets[index] + counts[index]) for index in indices])
    labels = _joined([sample.tokens[sample.response_mask] for sample in chosen])
    return MicroBatch(
        tokens_T=_tensor(tokens[held], np.int64, device),
        positions_T=_tensor(positions[held], np.int64, device),
        packed=PackedSequences.from_lengths(lengths, device, context=batch.context, context_rank=context_rank),
        response_R=_tensor(response[kept], np.int64, device),
        labels_R=_tensor(labels[kept], np.int64, device),
        places_R=_tensor(places[kept], np.int64, device),
        loss_tokens=_loss_tokens(batch, indices, chosen, kept, device),
        samples=indices,
    )


def _padded_lengths(batch: PackedBatch, chosen: list[Sample]) -> tuple[int, ...]:
    """Return the sequence lengths of the whole pack; a padding sequence comes last if T must grow or would be 0."""
    lengths = [padded_length(len(sample.tokens) - 1, batch.context) for sample in chosen]
    unit = batch.context * math.lcm(batch.multiple, 2 if batch.context > 1 else 1)
    # An empty micro-batch runs too, so that every rank takes part in every collective.
    padding = -sum(lengths) % unit if lengths else unit
    return (*lengths, padding) if padding else tuple(lengths)


def _loss_tokens(
    batch: PackedBatch, indices: tuple[int, ...], chosen: list[Sample], kept: np.ndarray, device: torch.device
) -> TokenBatch:
    counts = [int(sample.response_mask.sum()) for sample in chosen]
    held = np.repeat(np.arange(len(chosen)), counts)[kept]
    groups = _given([sample.group for sample in chosen], "group")

    def tensor(values: np.ndarray) -> torch.Tensor:
        return _tensor(values[kept], np.float32, device)

    def gather(name: str) -> torch.Tensor | None:
        values = _given([getattr(sample, name) for sample in chosen], name)
        return None if values is None else tensor(_joined(values))

    return TokenBatch(
        weights_T=tensor(np.repeat(batch.weights_S[list(indices)], counts)),
        advantages_T=tensor(
            _joined([np.broadcast_to(s.advantage, count) for s, count in zip(chosen, counts, strict=True)])
        ),
        token_fraction=batch.token_fraction,
        sampler_logprobs_T=gather("sampler_logprobs"),
        old_logprobs_T=gather("old_logprobs"),
        reference_logprobs_T=gather("reference_logprobs"),
        sequences=Sequences(
            counts_S=np.bincount(held, minlength=len(chosen)),
            lengths_S=np.array(counts, dtype=np.int64),
            groups_S=None if groups is None else np.array(groups, dtype=np.int64),
            device=device,
        ),
    )


def _given(values: list, name: str) -> list | None:
    """Return a field's values, or None if no sample has it."""
    missing = [value is None for value in values]
    if any(missing) and not all(missing):
        raise DataError(f"some samples of a batch have {name} and some have not; give it for all or for none")
    return None if any(missing) else values


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def _tensor(array: np.ndarray, dtype: type, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=dtype)).to(device, non_blocking=True)


def split_by_sample(flat: np.ndarray, batch: PackedBatch) -> list[np.ndarray]:
    """Cut a vector over all response tokens of a batch, in sample order, into one array per sample."""
    return np.split(flat, np.cumsum(batch.response_tokens)[:-1])


def flat_offsets(batch: PackedBatch) -> np.ndarray:
    """Return each sample's first position in the vector over all response tokens of the batch: int64 ``[S]``."""
    counts = batch.response_tokens
    return np.cumsum(counts) - counts
