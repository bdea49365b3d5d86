# SPDX-License-Identifier: Apache-2.0
"""Run forward and backward passes of a packed batch on mcore's pipeline schedules."""

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func

from megarl import progress
from megarl.errors import DataError
from megarl.loss.base import Loss
from megarl.loss.logprobs import token_logprobs
from megarl.model.layers.gpt import PackedGPTModel, inner_model
from megarl.model.step.packing import MicroBatch, PackedBatch, micro_batches, split_by_sample
from megarl.parallel.groups import Groups

# Maps (chunk, micro-batch) to the chunk's output.
RunChunk = Callable[[Any, MicroBatch], torch.Tensor]


def run_chunk(chunk: Any, item: MicroBatch) -> torch.Tensor:
    """Return a chunk's output for a micro-batch: on the last stage, hidden states ``[T, 1, hidden]``."""
    return chunk(
        input_ids=item.tokens_T[None],
        position_ids=item.positions_T[None],
        attention_mask=None,
        packed_seq_params=item.packed,
    )


def set_training(chunks: list[Any], training: bool) -> None:
    """Switch chunks between training and evaluation.

    Chunks that are already there are skipped: the switch visits every module, and the device waits for milliseconds.
    """
    for chunk in chunks:
        if chunk.training is not training:
            chunk.train(training)


class Metrics(Mapping[str, float]):
    """Metrics by name. Reading the first one waits for the device; until then the host keeps launching work."""

    def __init__(self, names: list[str], values: torch.Tensor) -> None:
        self._names, self._values = names, values

    @cached_property
    def _read(self) -> dict[str, float]:
        return dict(zip(self._names, self._values.tolist(), strict=True))

    def __getitem__(self, name: str) -> float:
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Stepper:
    """Runs batches through this rank's model chunks."""

    def __init__(
        self,
        chunks: list[Any],
        groups: Groups,
        *,
        vocab_size: int,
        temperature: float,
        run: RunChunk = run_chunk,
        keep_logits_gib: float = 0.0,
    ) -> None:
        """Store what every pass needs.

        Args:
            chunks: model chunks, wrapped in DDP or not.
            groups: this rank's process groups.
            vocab_size: vocabulary size without padding.
            temperature: the policy is softmax(logits / temperature).
            run: function that runs one chunk, as ``run_chunk`` does.
            keep_logits_gib: memory for kept logits, ``train.keep_logits_gib``.
        """
        self.chunks, self.groups, self.run = chunks, groups, run
        self.vocab_size, self.temperature = vocab_size, temperature
        # Not on a CPU: there, logits that stay in its caches are worth more than a saved matrix product.
        self.keep_bytes = int(keep_logits_gib * 2**30) if groups.device.type == "cuda" else 0

    def forward_backward(self, batch: PackedBatch, loss: Loss) -> Metrics:
        """Add the gradient of the batch's loss to the gradient buffers; return metrics over all ranks."""
        outputs = self._run(batch, partial(self._loss, loss=loss), forward_only=False)
        return self._reduce_metrics(outputs)

    @torch.no_grad()
    def evaluate(self, batch: PackedBatch, loss: Loss) -> Metrics:
        """Return the metrics of ``forward_backward`` without computing a gradient."""
        return self._reduce_metrics(self._run(batch, partial(self._loss, loss=loss), forward_only=True))

    @torch.no_grad()
    def logprobs(self, batch: PackedBatch, temperature: float | None = None) -> list[np.ndarray]:
        """Return the logprobs of each sample, float32 ``[R]``, in the batch's order, on every rank.

        Args:
            batch: the packed batch.
            temperature: another one than the policy's.
        """
        policy = self.temperature
        self.temperature = policy if temperature is None else temperature
        try:
            outputs = self._run(batch, self._collect, forward_only=True)
        finally:
            self.temperature = policy
        flat = torch.zeros(int(batch.response_tokens.sum()), dtype=torch.float32, device=self.groups.device)
        for output in outputs:
            flat[output["places"]] = output["logprobs"]
        dist.all_reduce(flat, group=self.groups.data_context)
        dist.broadcast(flat, self.groups.last_stage_rank(), group=self.groups.pipeline)
        return split_by_sample(flat.cpu().numpy(), batch)

    def _run(self, batch: PackedBatch, loss_function: Callable, *, forward_only: bool) -> list[dict]:
        self._check_layout(batch)
        items = micro_batches(batch, self.groups.data_rank, self.groups.device, context_rank=self.groups.context_rank)
        iterators: list[Iterator[MicroBatch]] = [iter(items) for _ in self.chunks]
        return get_forward_backward_func()(
            forward_step_func=partial(_forward_step, run=self.run, loss_function=loss_function),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(items),
            # With variable_seq_lengths the stages exchange the real shapes.
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _check_layout(self, batch: PackedBatch) -> None:
        here, data = self.groups.topology, len(batch.plan)
        if (data, batch.context) != (here.data, here.context):
            raise DataError(
                f"the batch was packed for data={data}, context={batch.context}, but parallel.data is {here.data} and "
                f"parallel.context is {here.context}; pack it with MegatronModel.pack"
            )

    def _logprobs(
        self, model: PackedGPTModel, item: MicroBatch, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute logprobs and entropies ``[R]`` of the response tokens. The output layer runs on no other token."""
        hidden = model.tokens_hidden(hidden_states).index_select(0, item.response_R)
        weight = model.output_weight()
        return token_logprobs(
            hidden,
            weight,
            item.labels_R,
            deltas=model.output_deltas(hidden_states, item.response_R),
            temperature=self.temperature,
            group=self.groups.tensor if self.groups.topology.tensor > 1 else None,
            vocab_start=self.groups.tensor_rank * weight.shape[0],
            vocab_size=self.vocab_size,
            keep_bytes=self.keep_bytes,
        )

    def _loss(self, hidden_states: torch.Tensor, model: PackedGPTModel, item: MicroBatch, *, loss: Loss) -> tuple:
        # Filled on the device: a copy from the host would wait for all queued work.
        count = torch.full((), len(item.labels_R), dtype=torch.int, device=hidden_states.device)
        tokens = item.loss_tokens
        if tokens.is_empty:
            return hidden_states.sum() * 0.0, count, {}
        if self.groups.topology.context > 1:
            tokens = tokens.over_context(self.groups.context)
        if not len(item.labels_R):
            # Other context-parallel ranks have tokens, and the loss may sum over sequences with them.
            output = loss(hidden_states.flatten()[:0].float(), tokens)
            return output.loss + hidden_states.sum() * 0.0, count, output.metrics
        logprobs, entropy = self._logprobs(model, item, hidden_states)
        output = loss(logprobs, tokens)
        mean = entropy.detach().sum() * tokens.token_fraction
        return output.loss, count, output.metrics | {"entropy": mean}

    def _collect(self, hidden_states: torch.Tensor, model: PackedGPTModel, item: MicroBatch) -> tuple:
        logprobs = self._logprobs(model, item, hidden_states)[0] if len(item.labels_R) else hidden_states.new_zeros(0)
        record = {"logprobs": logprobs.float(), "places": item.places_R}
        return hidden_states.new_zeros(()), torch.zeros((), dtype=torch.int, device=hidden_states.device), record

    def _reduce_metrics(self, outputs: list[dict[str, torch.Tensor]]) -> Metrics:
        """Combine metrics over micro-batches, DP and CP ranks, and broadcast them to every pipeline stage."""
        names = self._metric_names(outputs)
        if not names:
            return Metrics([], torch.zeros(0))
        highest = torch.tensor([name.endswith("_max") for name in names]).to(self.groups.device, non_blocking=True)
        neutral = torch.where(highest, -torch.inf, torch.zeros(len(names), dtype=torch.float64, device=highest.device))
        per_batch = [neutral]
        for output in outputs:
            values = [output[name].double() if name in output else neutral[i] for i, name in enumerate(names)]
            per_batch.append(torch.stack(values))
        rows = torch.stack(per_batch)
        totals, peaks = rows.sum(dim=0), rows.amax(dim=0)
        dist.all_reduce(totals, group=self.groups.data_context)
        dist.all_reduce(peaks, op=dist.ReduceOp.MAX, group=self.groups.data_context)
        reduced = torch.where(highest, peaks, totals)
        dist.broadcast(reduced, self.groups.last_stage_rank(), group=self.groups.pipeline)
        return Metrics(names, reduced)

    def _metric_names(self, outputs: list[dict[str, torch.Tensor]]) -> list[str]:
        """Return the names of all metrics of any rank. Objects are slow to send, so a single rank sends none."""
        names: list[Any] = [sorted({name for output in outputs for name in output})]
        everyone, stages = self.groups.data_context, self.groups.pipeline
        if self.groups.last_stage and everyone.size() > 1:
            gathered: list[Any] = [None] * everyone.size()
            dist.all_gather_object(gathered, names[0], group=everyone)
            names = [sorted(set().union(*gathered))]
        if stages.size() > 1:
            dist.broadcast_object_list(names, self.groups.last_stage_rank(), group=stages)
        return names[0]


def _forward_step(
    iterator: Iterator[MicroBatch],
    model: Any,
    *,
    run: Callable[[Any, MicroBatch], torch.Tensor],
    loss_function: Callable,
) -> tuple:
    """mcore's forward step: returns the chunk's output and the function that computes its loss."""
    progress.made()
    item = next(iterator)
    return run(model, item), partial(loss_function, model=inner_model(model), item=item)
