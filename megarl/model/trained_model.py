# SPDX-License-Identifier: Apache-2.0
"""Train, save and export a frozen model with adapters, whatever computes it: the interface of all back ends.

Unless a method says otherwise, it is a collective over all ranks: every rank calls it with the same arguments and gets
the same result.
"""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.config import TrainerConfig
from megarl.errors import MegarlError, UnsupportedError, pick
from megarl.loss.base import Loss
from megarl.model.adapter import Adapter, Optimizer
from megarl.model.checkpoint import training_state
from megarl.model.checkpoint.writer import BackgroundWriter
from megarl.model.layers.sequence_work import SequenceWork
from megarl.model.step.packing import PackedBatch, check_ids, pack
from megarl.model.step.stepper import Metrics, Stepper
from megarl.model.weight_export import WeightExport
from megarl.model.weights.streaming import stream_full
from megarl.parallel.groups import Groups
from megarl.types import Sample


class TrainedModel(WeightExport):
    """A frozen base model with one or several adapters. Each adapter has its own optimizer and policy version.

    Every method acts on the active adapter. That is the first one until ``set_active`` chooses another. A back end
    builds itself and defines ``_check_length``, ``_set_training`` and ``_base_tensors``.

    Attributes:
        config: the trainer's settings.
        groups: this rank's process groups.
        hf_config: the model's ``config.json``, completed; a back end sets it.
        adapters: all adapters, by name.
        adapter: the active adapter.
        optimizer: the active adapter's optimizer.
        version: the active adapter's policy version: the number of optimizer steps behind its weights.
    """

    hf_config: dict[str, Any]

    def __init__(
        self,
        config: TrainerConfig,
        groups: Groups,
        adapters: Sequence[Adapter],
        optimizers: Mapping[str, Optimizer],
        stepper: Stepper,
        *,
        work: SequenceWork,
        identity: Mapping[str, Any] | None,
        multiple: int = 1,
    ) -> None:
        """Take what a back end has built.

        Args:
            config: the trainer's settings; ``RunConfig.trainer`` has those of a run.
            groups: process groups, from ``init_groups``.
            adapters: all adapters; the first one is active.
            optimizers: the optimizer of each adapter that is trained, by its name.
            stepper: runs batches.
            work: cost model by which micro-batches are balanced.
            identity: describes the base model in checkpoints, on rank 0. None: the model has no checkpoints.
            multiple: micro-batches are padded to a multiple of so many tokens.
        """
        self.config, self.groups, self.rank = config, groups, groups.rank
        self.adapters = {adapter.name: adapter for adapter in adapters}
        self.adapter = adapters[0]
        self._optimizers = dict(optimizers)
        self._stepper = stepper
        self._work, self._multiple = work, multiple
        self._writer = BackgroundWriter()
        self._identity = identity
        self._versions = dict.fromkeys(self.adapters, 0)
        self._pending: str | None = None
        for optimizer in self._optimizers.values():
            optimizer.zero_grad()

    def _check_length(self, length: int, subject: str) -> None:
        """Raise ``UnsupportedError`` if the model does not compute sequences of ``length`` tokens exactly."""
        raise NotImplementedError

    def _set_training(self, training: bool) -> None:
        """Switch dropout on or off."""
        raise NotImplementedError

    def _accumulating(self, last: bool) -> contextlib.AbstractContextManager:
        """Return the context of one ``forward_backward``; ``last`` as there."""
        return contextlib.nullcontext()

    @property
    def optimizer(self) -> Optimizer:
        """The active adapter's optimizer.

        Raises:
            MegarlError: the active adapter is frozen.
        """
        if not self.adapter.trainable:
            raise MegarlError(f"adapter '{self.adapter.name}' is frozen; only trained ones have an optimizer")
        return self._optimizers[self.adapter.name]

    @property
    def version(self) -> int:
        """The active adapter's policy version."""
        return self._versions[self.adapter.name]

    @version.setter
    def version(self, version: int) -> None:
        self._versions[self.adapter.name] = version

    def set_active(self, name: str) -> None:
        """Choose the adapter to compute with, train, save and load. Not a collective; copies nothing.

        Raises:
            ConfigError: no adapter has this name.
        """
        self.adapter = pick(self.adapters, name, "adapter")
        self.adapter.activate()

    def _check_pending(self) -> None:
        """Refuse to mix gradients of two adapters: the buffers are reduced and cleared for all adapters together."""
        if self._pending not in (None, self.adapter.name):
            raise MegarlError(
                f"adapter '{self._pending}' has a gradient that no update has used; call optim_step for it before "
                f"'{self.adapter.name}' is trained"
            )

    def _drop_gradient(self) -> None:
        if self._pending == self.adapter.name:
            self.optimizer.reduce_gradients()  # the sum over ranks may be under way
            self.optimizer.zero_grad()
            self._pending = None

    def pack(
        self, samples: Sequence[Sample], weights_S: np.ndarray | None = None, step_tokens: int | None = None
    ) -> PackedBatch:
        """Plan the micro-batches for this layout; see ``packing.pack``. Not a collective."""
        parallel, train = self.config.parallel, self.config.train
        check_ids(samples, self.hf_config.get("vocab_size"))
        self._check_length(max((len(sample.tokens) for sample in samples), default=0), "a sample's length")
        return pack(
            samples,
            weights_S,
            max_tokens=train.micro_batch_tokens,
            data=parallel.data,
            pipeline=parallel.pipeline,
            virtual_pipeline=parallel.virtual_pipeline,
            context=parallel.context,
            multiple=self._multiple,
            step_tokens=step_tokens,
            work=self._work,
        )

    def forward_backward(self, batch: PackedBatch, loss: Loss, *, last: bool = True) -> Metrics:
        """Add the gradient of the batch's loss. Call it again to accumulate, then call ``optim_step``.

        Args:
            batch: the packed batch, from ``pack``, with the loss weights of the whole step.
            loss: called once per micro-batch on the last pipeline stage.
            last: False if more batches of this step follow. Only ``train.overlap_grad_reduce`` needs it: gradients are
                then summed over ranks during the last backward pass.

        Returns:
            The loss's metrics over all ranks. Reading the first of them waits for the device.

        Raises:
            MegarlError: the adapter is frozen; or another adapter's gradient waits for its ``optim_step``; or the
                gradient of this step is already reduced (by ``gradients()``, or with ``train.overlap_grad_reduce`` by a
                call with ``last=True``) and ``optim_step`` must come first.
        """
        self._check_pending()
        if self.optimizer.reduced:
            raise MegarlError("forward_backward after gradients(): the sum is already reduced; call optim_step first")
        if self.optimizer.reducing:
            raise MegarlError(
                "forward_backward after the step's last one: with train.overlap_grad_reduce the sum is already "
                "reduced; pass last=False while more batches follow, or call optim_step first"
            )
        self._pending = self.adapter.name
        self._set_training(True)
        self.optimizer.reducing = last and self.config.train.overlap_grad_reduce
        with self._accumulating(last):
            return self._stepper.forward_backward(batch, loss)

    def evaluate(self, batch: PackedBatch, loss: Loss) -> Metrics:
        """Return the metrics of ``forward_backward`` over all ranks, without gradient and without dropout."""
        self._set_training(False)
        return self._stepper.evaluate(batch, loss)

    def optim_step(self, lr: float) -> dict[str, float]:
        """Update the adapter once with AdamW; ``version`` goes up by one.

        Without a ``forward_backward`` before it the gradient is zero; AdamW still applies its moments and the weight
        decay.

        Args:
            lr: learning rate of this update.

        Returns:
            ``learning_rate``, and what ``AdapterOptimizer.step`` measured of the gradient: ``grad_norm``,
            ``grad_tensors`` and ``adapter_tensors``.

        Raises:
            GradientError: the gradient norm is not finite. Nothing was updated.
            MegarlError: the accumulated gradient belongs to another adapter.
        """
        self._check_pending()
        try:
            measured = self.optimizer.step(lr)
        finally:
            self._pending = None
        self.version += 1
        return measured | {"learning_rate": lr}

    def measured(self) -> dict[str, float]:
        """Return ``forward_seconds`` and ``backward_seconds`` of this rank's updates since the last call."""
        return self._stepper.clock.read()

    def forward(
        self, batch: PackedBatch, *, adapter: bool | str = True, temperature: float | None = None
    ) -> list[np.ndarray]:
        """Compute the logprobs of the response tokens, without gradient and without dropout.

        Args:
            batch: the packed batch, from ``pack``.
            adapter: True uses the active adapter, False none (the base model), a name that one of ``adapters``.
            temperature: divisor of the logits; default: the policy's.

        Returns:
            One float32 array ``[R]`` per sample, in the batch's order.

        Raises:
            ConfigError: no adapter has this name.
        """
        self._set_training(False)
        if isinstance(adapter, str):
            computing: contextlib.AbstractContextManager = pick(self.adapters, adapter, "adapter").activated()
        else:
            computing = contextlib.nullcontext() if adapter else self.adapter.disabled()
        with computing:
            return self._stepper.logprobs(batch, temperature)

    def save_checkpoint(self, path: str | Path, extra: Mapping[str, Any] | None = None) -> None:
        """Start writing all that a bitwise resume needs, except the base model; see ``training_state.save``.

        Returns once the state is copied to rank 0's host memory; a thread writes it. The checkpoint appears under its
        name when it is complete. A failure is raised by the next call of ``save_checkpoint``, ``load_checkpoint`` or
        ``finish_checkpoint``.

        Raises:
            UnsupportedError: the base weights are not those of ``model.path``.
        """
        if self._identity is None:
            raise UnsupportedError("a model built with fill_base has no checkpoints; save_adapter writes its adapter")
        self._finish_param_gather()
        said: dict[str, Any] = {"identity": self._identity, "version": self.version, "extra": extra or {}}
        training_state.save(path, self.adapter, self.optimizer, self.groups, self._writer, **said)

    def finish_checkpoint(self) -> None:
        """Wait for the checkpoint that is being written, if any. Not a collective: only rank 0 writes.

        Raises:
            CheckpointError: it could not be written.
        """
        self._writer.wait()

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        """Restore a checkpoint made at any layout, drop the gradient, return ``extra``; see ``training_state.load``."""
        self.version, extra = training_state.load(
            path, self.adapter, self.optimizer, self.groups, self._writer, base=self.config.model.path
        )
        self._drop_gradient()
        return extra

    def load_adapter(self, path: str | Path) -> None:
        """Load a PEFT adapter directory into the active adapter, reset its optimizer and drop its gradient.

        Raises:
            AdapterError: the directory does not fit the adapter. Nothing was changed.
        """
        self.adapter.read(path)
        if self.adapter.trainable:
            self.optimizer.start_anew()
            self._drop_gradient()

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the whole accumulated gradient: reduced, float32, on the CPU, under the names of PEFT's files.

        ``optim_step`` may follow.
        """
        self.optimizer.reduce_gradients()
        tensors = self.adapter.tensors(self.optimizer.gradients())
        return {n: tensor.cpu().clone() for n, tensor in self.adapter.in_file(stream_full(tensors, self.groups))}
