# SPDX-License-Identifier: Apache-2.0
"""Run a packed batch: compute logprobs, losses and metrics, whatever computes the model's outputs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megarl.cuda_memory import download, upload
from megarl.errors import DataError
from megarl.loss.base import Loss
from megarl.loss.late_checks import late_checks
from megarl.model.step.micro_batch import MicroBatch, micro_batches
from megarl.model.step.packing import PackedBatch, split_by_sample
from megarl.model.step.pass_clock import PassClock
from megarl.parallel.groups import Groups, host_group


class Metrics(Mapping[str, float]):
    """Metrics by name. Reading the first one waits for the device; until then the host keeps launching work."""

    def __init__(self, names: list[str], values: torch.Tensor) -> None:
        self._names, self._values = names, download(values)

    @cached_property
    def _read(self) -> dict[str, float]:
        return dict(zip(self._names, self._values().tolist(), strict=True))

    def __getitem__(self, name: str) -> float:
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Stepper(ABC):
    """Runs batches through this rank's part of a model.

    A back end gives ``_run_items`` and ``_logprobs``. What its model returns for a micro-batch is its own affair: one
    tensor with gradient, which only ``_logprobs`` looks into.

    Attributes:
        clock: measures forward and backward passes; ``_run_items`` tells it of both.
    """

    def __init__(self, groups: Groups, *, temperature: float, keep_logits_gib: float = 0.0) -> None:
        """Store what every pass needs.

        Args:
            groups: this rank's process groups.
            temperature: the policy is softmax(logits / temperature).
            keep_logits_gib: memory for kept logits, ``train.keep_logits_gib``.
        """
        self.groups, self.temperature = groups, temperature
        # Not on a CPU: there, logits that stay in its caches are worth more than a saved matrix product.
        self.clock = PassClock(groups.device)
        self.keep_bytes = int(keep_logits_gib * 2**30) if groups.device.type == "cuda" else 0

    @abstractmethod
    def _run_items(self, items: list[MicroBatch], loss_function: Callable, *, forward_only: bool) -> list[dict]:
        """Run micro-batches forward and, unless ``forward_only``, backward.

        Args:
            items: this rank's parts of them.
            loss_function: called with a micro-batch's output, ``model=`` (the model that ``_logprobs`` gets) and
                ``item=``; returns ``(loss, number of response tokens, record)``.
            forward_only: True skips the backward passes.

        Returns:
            The records in order; none on a rank that has no outputs.
        """

    @abstractmethod
    def _logprobs(self, model: Any, item: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute logprobs and entropies of a micro-batch's response tokens, ``[R]``, from the model's output."""

    def forward_backward(self, batch: PackedBatch, loss: Loss) -> Metrics:
        """Add the gradient of the batch's loss to the gradient buffers; return metrics over all ranks."""
        self.clock.running = True
        try:
            outputs = self._run(batch, partial(self._loss, loss=loss), forward_only=False)
        finally:
            self.clock.running = False
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
        with late_checks():
            return self._run_items(items, loss_function, forward_only=forward_only)

    def _check_layout(self, batch: PackedBatch) -> None:
        here, data = self.groups.topology, len(batch.plan)
        if (data, batch.context) != (here.data, here.context):
            raise DataError(
                f"the batch was packed for data={data}, context={batch.context}, but parallel.data is {here.data} and "
                f"parallel.context is {here.context}; pack it with the model's own pack()"
            )

    def _loss(self, output: torch.Tensor, model: Any, item: MicroBatch, *, loss: Loss) -> tuple:
        # Filled on the device: a copy from the host would wait for all queued work.
        count = torch.full((), len(item.labels_R), dtype=torch.int, device=output.device)
        tokens = item.loss_tokens
        # Also without a token here: the output layer's adapter then has a gradient, of zeros, on every rank.
        logprobs, entropy = self._logprobs(model, item, output)
        if tokens.is_empty:
            return (logprobs.sum() + output.sum()) * 0.0, count, {}
        if self.groups.topology.context > 1:
            tokens = tokens.over_context(self.groups.context)
        # Other context-parallel ranks may have tokens of its sequences, over which the loss may sum.
        share = loss(logprobs, tokens)
        if not len(item.labels_R):
            return share.loss + (logprobs.sum() + output.sum()) * 0.0, count, share.metrics
        mean = entropy.detach().sum() * tokens.token_fraction
        return share.loss, count, share.metrics | {"entropy": mean}

    def _collect(self, output: torch.Tensor, model: Any, item: MicroBatch) -> tuple:
        logprobs = self._logprobs(model, item, output)[0] if len(item.labels_R) else output.new_zeros(0)
        record = {"logprobs": logprobs.float(), "places": item.places_R}
        return output.new_zeros(()), torch.zeros((), dtype=torch.int, device=output.device), record

    def _reduce_metrics(self, outputs: list[dict[str, torch.Tensor]]) -> Metrics:
        """Combine metrics over micro-batches, DP and CP ranks, and broadcast them to every pipeline stage."""
        names = self._metric_names(outputs)
        if not names:
            return Metrics([], torch.zeros(0))
        highest = upload(torch.tensor([name.endswith("_max") for name in names]), self.groups.device)
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
        """Return the names of all metrics of any rank.

        By the hosts: through the devices it would wait until they have done all that the step has launched.
        """
        names: list[Any] = [sorted({name for output in outputs for name in output})]
        everyone, stages = self.groups.data_context, self.groups.pipeline
        if self.groups.last_stage and everyone.size() > 1:
            gathered: list[Any] = [None] * everyone.size()
            dist.all_gather_object(gathered, names[0], group=host_group(everyone))
            names = [sorted(set().union(*gathered))]
        if stages.size() > 1:
            dist.broadcast_object_list(names, self.groups.last_stage_rank(), group=host_group(stages))
        return names[0]
