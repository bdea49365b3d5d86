# SPDX-License-Identifier: Apache-2.0
"""Make the tensors of one rank's share of a packed batch.

Shape letters: T packed input tokens of a micro-batch on this rank, S sequences, R response tokens on this rank.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial

import numpy as np
import torch

from megarl.cuda_memory import Upload, upload_together
from megarl.errors import DataError
from megarl.loss.base import TokenBatch
from megarl.loss.sequences import Sequences
from megarl.model.layers.attention.core import PackedSequences
from megarl.model.layers.attention.zigzag import padded_length, rank_runs, rank_tokens
from megarl.model.step.packing import PackedBatch, flat_offsets
from megarl.triton_support import power_of_two
from megarl.types import Sample

# Fields that all samples of a micro-batch have, or none.
LOGPROBS = ("sampler_logprobs", "old_logprobs", "reference_logprobs")
FIELDS = ("group", *LOGPROBS)
# Least number of sequences that the bounds on the device have room for; otherwise it is a power of two.
FEWEST_SEQUENCES = 16


@dataclass(frozen=True)
class Inputs:
    """Hold what a micro-batch feeds to the model, on the device; see ``MicroBatch``.

    Attributes:
        memory: uint8; holds the tensors. It has the same size for packs of the same T and room.
        bounds: bounds of the sequences, then those of empty ones as far as there is room, int32.
    """

    memory: torch.Tensor
    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    bounds: torch.Tensor
    packed: PackedSequences


@dataclass(frozen=True)
class Outputs:
    """The use of a micro-batch's outputs, on the device; see ``MicroBatch``."""

    response_R: torch.Tensor
    labels_R: torch.Tensor
    places_R: torch.Tensor
    loss_tokens: TokenBatch


@dataclass(frozen=True)
class MicroBatch:
    """This rank's part of one packed micro-batch, on the device.

    Its tensors are made when the first of them is asked for. A device that runs another micro-batch, or this one's
    layers, need not wait for those that come later.

    Attributes:
        samples: index in the batch of each sequence of the whole pack; the pack's padding comes after them.
        make_inputs, make_outputs: make the tensors.
        tokens_T: int64 inputs. Padding lies at the end of each sequence (CP), and at the end of the pack as a sequence
            of its own. No other token attends to it.
        positions_T: int64, position of each token within its sequence.
        packed: the sequences' bounds, for attention.
        response_R: packed positions whose next token the policy chose, int64.
        labels_R: those next tokens, int64.
        places_R: positions of those tokens in the vector over all response tokens of the batch, int64 (see
            ``flat_offsets``).
        loss_tokens: per-token inputs of the loss.
    """

    samples: tuple[int, ...]
    make_inputs: Callable[[], Inputs]
    make_outputs: Callable[[], Outputs]

    @cached_property
    def inputs(self) -> Inputs:
        return self.make_inputs()

    @property
    def tokens_T(self) -> torch.Tensor:
        return self.inputs.tokens_T

    @property
    def positions_T(self) -> torch.Tensor:
        return self.inputs.positions_T

    @property
    def packed(self) -> PackedSequences:
        return self.inputs.packed

    @cached_property
    def _outputs(self) -> Outputs:
        return self.make_outputs()

    @property
    def response_R(self) -> torch.Tensor:
        return self._outputs.response_R

    @property
    def labels_R(self) -> torch.Tensor:
        return self._outputs.labels_R

    @property
    def places_R(self) -> torch.Tensor:
        return self._outputs.places_R

    @property
    def loss_tokens(self) -> TokenBatch:
        return self._outputs.loss_tokens


def micro_batches(
    batch: PackedBatch, data_rank: int, device: torch.device, *, context_rank: int = 0
) -> list[MicroBatch]:
    """Return the tensors of one rank's part of its micro-batches, in order."""
    return [_assemble(batch, indices, context_rank, device) for indices in batch.plan[data_rank]]


def _assemble(batch: PackedBatch, indices: tuple[int, ...], context_rank: int, device: torch.device) -> MicroBatch:
    chosen = [batch.samples[index] for index in indices]
    for name in FIELDS:
        _given([getattr(sample, name) for sample in chosen], name)  # every rank finds the error before any runs
    given = (batch, chosen, _padded_lengths(batch, chosen), context_rank, device)
    return MicroBatch(indices, partial(_inputs, *given), partial(_outputs, indices, *given))


def _inputs(
    batch: PackedBatch, chosen: list[Sample], lengths: tuple[int, ...], context_rank: int, device: torch.device
) -> Inputs:
    """Return what ``MicroBatch.make_inputs`` makes; ``lengths`` is of ``_padded_lengths``."""
    count = sum(lengths) // batch.context
    sizes = [(count, np.int64), (count, np.int64), (sequence_room(len(lengths)) + 1, np.int32)]
    upload = Upload(sizes, device)
    tokens, positions, bounds = upload.arrays
    runs = rank_runs(lengths, batch.context, context_rank)
    table, per_sequence, at = _positions(power_of_two(max(lengths))), len(runs) // len(lengths), 0
    for place, run in enumerate(runs):
        end, sequence = at + run.length, place // per_sequence
        positions[at:end] = table[run.before : run.keys]
        fed = chosen[sequence].tokens[:-1][run.before : run.keys] if sequence < len(chosen) else ()
        tokens[at : at + len(fed)] = fed
        tokens[at + len(fed) : end] = 0
        at = end
    bounds[0], bounds[len(lengths) + 1 :] = 0, sum(lengths)
    np.cumsum(lengths, out=bounds[1 : len(lengths) + 1])
    memory, (tokens_T, positions_T, room) = upload.send()
    packed = PackedSequences.from_lengths(
        lengths, device, context=batch.context, context_rank=context_rank, bounds=room[: len(lengths) + 1]
    )
    return Inputs(memory, tokens_T, positions_T, room, packed)


def sequence_room(count: int) -> int:
    """Return the number of sequences for which the bounds of ``count`` have room."""
    return max(FEWEST_SEQUENCES, power_of_two(count))


@cache
def _positions(count: int) -> np.ndarray:
    return np.arange(count)


def _outputs(
    indices: tuple[int, ...],
    batch: PackedBatch,
    chosen: list[Sample],
    lengths: tuple[int, ...],
    context_rank: int,
    device: torch.device,
) -> Outputs:
    """Return what ``MicroBatch.make_outputs`` makes; ``lengths`` is of ``_padded_lengths``."""
    starts = np.cumsum([0, *lengths])
    held = rank_tokens(lengths, batch.context, context_rank)
    here = np.full(starts[-1], -1)
    here[held] = np.arange(len(held))
    # For all response tokens of the micro-batch, in sample order: their position on this rank (-1: elsewhere), and the
    # indices of those that are here.
    response = here[_joined([s + np.flatnonzero(c.response_mask[1:]) for s, c in zip(starts, chosen, strict=False)])]
    kept = np.flatnonzero(response >= 0)
    offsets, counts = flat_offsets(batch), batch.response_tokens
    places = _joined([np.arange(offsets[index], offsets[index] + counts[index]) for index in indices])
    labels = _joined([sample.tokens[sample.response_mask] for sample in chosen])
    used = [values[kept].astype(np.int64, copy=False) for values in (response, labels, places)]
    given = _loss_inputs(batch, indices, chosen, kept)
    response_R, labels_R, places_R, *moved = upload_together([*used, *given.values()], device)
    by_name = dict(zip(given, moved, strict=True))
    sequences = _sequences(chosen, kept, device)
    loss_tokens = TokenBatch(token_fraction=batch.token_fraction, sequences=sequences, **by_name)
    return Outputs(response_R, labels_R, places_R, loss_tokens)


def _padded_lengths(batch: PackedBatch, chosen: list[Sample]) -> tuple[int, ...]:
    """Return the sequence lengths of the whole pack; a padding sequence comes last if T must grow or would be 0."""
    lengths = [padded_length(len(sample.tokens) - 1, batch.context) for sample in chosen]
    unit = batch.context * math.lcm(batch.multiple, 2 if batch.context > 1 else 1)
    # An empty micro-batch runs too, so that every rank takes part in every collective.
    padding = -sum(lengths) % unit if lengths else unit
    return (*lengths, padding) if padding else tuple(lengths)


def _loss_inputs(
    batch: PackedBatch, indices: tuple[int, ...], chosen: list[Sample], kept: np.ndarray
) -> dict[str, np.ndarray]:
    """Return what the loss gets for each token, by ``TokenBatch``'s names; no logprobs that the samples do not have."""
    counts = [int(sample.response_mask.sum()) for sample in chosen]
    advantages = [np.broadcast_to(sample.advantage, count) for sample, count in zip(chosen, counts, strict=True)]
    values = {"weights_T": np.repeat(batch.weights_S[list(indices)], counts), "advantages_T": _joined(advantages)}
    fields = {f"{name}_T": _given([getattr(sample, name) for sample in chosen], name) for name in LOGPROBS}
    values |= {name: _joined(field) for name, field in fields.items() if field is not None}
    return {name: value[kept].astype(np.float32, copy=False) for name, value in values.items()}


def _sequences(chosen: list[Sample], kept: np.ndarray, device: torch.device) -> Sequences:
    counts = [int(sample.response_mask.sum()) for sample in chosen]
    held = np.repeat(np.arange(len(chosen)), counts)[kept]
    groups = _given([sample.group for sample in chosen], "group")
    return Sequences(
        counts_S=np.bincount(held, minlength=len(chosen)),
        lengths_S=np.array(counts, dtype=np.int64),
        groups_S=None if groups is None else np.array(groups, dtype=np.int64),
        device=device,
    )


def _given(values: list, name: str) -> list | None:
    """Return a field's values, or None if no sample has it."""
    missing = [value is None for value in values]
    if any(missing) and not all(missing):
        raise DataError(f"some samples of a batch have {name} and some have not; give it for all or for none")
    return None if any(missing) else values


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
