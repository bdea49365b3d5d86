# SPDX-License-Identifier: Apache-2.0
"""One model on this rank: built, trained, saved and exported. The same under torchrun and inside Ray actors.

Every method is a collective over all ranks unless it says otherwise; every rank passes the same arguments and gets the
same result.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.config import TrainerConfig, checks
from megarl.errors import MegarlError, pick
from megarl.loss.base import Loss
from megarl.model import checkpoint
from megarl.model.adapter import Attach
from megarl.model.checkpoint_writer import BackgroundWriter
from megarl.model.identity import identify
from megarl.model.layers.build import build_chunks
from megarl.model.layers.rope import rope_of
from megarl.model.optimizer.adapter_optimizer import AdapterOptimizer, make_optimizers
from megarl.model.optimizer.ddp import without_reduction, wrap_ddp
from megarl.model.step.graphs import graphed, token_unit
from megarl.model.step.packing import PackedBatch, pack
from megarl.model.step.schedule import Metrics, Stepper, run_chunk, set_training
from megarl.model.step.sequence_work import sequence_work
from megarl.model.weights.base_tensors import base_tensors, load_base
from megarl.model.weights.full_config import names_of
from megarl.model.weights.hf_folder import read_config
from megarl.model.weights.sharded_tensor import ShardedTensor
from megarl.model.weights.streaming import stream_full
from megarl.parallel.groups import Groups
from megarl.types import Sample


class MegatronModel:
    """A frozen base model with one or several adapters, each with an optimizer and a version of its own.

    Every method is about the active adapter: the first, until ``set_active``.

    Attributes:
        adapters: what ``attach`` returned, by name.
        adapter: the active one.
        optimizer: its optimizer.
        version: its policy version, the number of optimizer steps behind the weights.
        groups: this rank's place.
    """

    def __init__(self, config: TrainerConfig, groups: Groups, attach: Attach) -> None:
        """Build, load the base weights (each rank its own slices), add the adapter, make the optimizer.

        Args:
            config: settings; a run's are ``RunConfig.trainer``.
            groups: from ``init_groups``.
            attach: puts the adapters on (``megarl.lora``).

        Raises:
            ModelError: the folder is incomplete or does not match its config.
            UnsupportedError: the family or a setting is not supported; or several trained adapters together with
                ``train.distributed_optimizer`` or ``train.overlap_grad_reduce``.
        """
        self.config, self.groups = config, groups
        self.hf_config = read_config(config.model.path)
        checks.check_graphs(config, self.hf_config)
        self._rope = rope_of(self.hf_config)
        if config.longest is not None:
            self._rope.check_length(config.longest, "sampler.max_prompt_tokens + sampler.max_response_tokens")
        self.chunks = build_chunks(self.hf_config, config.model, config.parallel, groups, config.train)
        load_base(self.chunks, config.model.path, self.hf_config, groups)
        attached = attach(self.chunks, self.hf_config, groups)
        several = list(attached) if isinstance(attached, Sequence) else [attached]
        self.adapters = {adapter.name: adapter for adapter in several}
        self.adapter = several[0]
        self._wrapped = wrap_ddp(self.chunks, config.train)
        trained = {name: adapter.parameters() for name, adapter in self.adapters.items() if adapter.trainable}
        self._optimizers = make_optimizers(self._wrapped, trained, config.train)
        self._stepper = Stepper(
            self._wrapped,
            groups,
            vocab_size=self.hf_config["vocab_size"],
            temperature=config.temperature,
            run=graphed(self._wrapped, groups.device) if config.train.cuda_graphs else run_chunk,
            keep_logits_gib=config.train.keep_logits_gib,
        )
        self._work = sequence_work(self.hf_config)
        self._writer = BackgroundWriter()
        # Now: the folder may be gone when the first checkpoint is saved. Rank 0 writes it.
        self._identity = identify(config.model.path) if groups.rank == 0 else {}
        self._versions = dict.fromkeys(self.adapters, 0)
        self._pending: str | None = None
        for optimizer in self._optimizers.values():
            optimizer.zero_grad()

    @property
    def optimizer(self) -> AdapterOptimizer:
        """The active adapter's.

        Raises:
            MegarlError: it is frozen.
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
        """Compute with, train, save and load another adapter from now on. Not a collective; nothing is copied.

        Raises:
            ConfigError: there is no such adapter.
        """
        self.adapter = pick(self.adapters, name, "adapter")
        self.adapter.activate()

    def _finish_param_gather(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.finish_param_gather()

    def _check_pending(self) -> None:
        """The gradient buffers are reduced and cleared together, so they hold one adapter's gradient at a time."""
        if self._pending not in (None, self.adapter.name):
            raise MegarlError(
                f"adapter '{self._pending}' has a gradient that no update has used; call optim_step for it before "
                f"'{self.adapter.name}' is trained"
            )

    def _base_tensors(self, *, untied: bool = False) -> list[ShardedTensor]:
        names = names_of(self.hf_config)
        return [tensor for chunk in self.chunks for tensor in base_tensors(chunk, names, self.groups, untied=untied)]

    def pack(
        self, samples: Sequence[Sample], weights_S: np.ndarray | None = None, step_tokens: int | None = None
    ) -> PackedBatch:
        """Plan the micro-batches for this layout; see ``packing.pack``. Not a collective."""
        parallel, train = self.config.parallel, self.config.train
        self._rope.check_length(max((len(sample.tokens) for sample in samples), default=0), "a sample's length")
        return pack(
            samples,
            weights_S,
            max_tokens=train.micro_batch_tokens,
            data=parallel.data,
            pipeline=parallel.pipeline,
            virtual_pipeline=parallel.virtual_pipeline,
            context=parallel.context,
            multiple=token_unit(train.micro_batch_tokens, parallel.tensor) if train.cuda_graphs else parallel.tensor,
            step_tokens=step_tokens,
            work=self._work,
        )

    def forward_backward(self, batch: PackedBatch, loss: Loss, *, last: bool = True) -> Metrics:
        """Add the gradient of the batch's loss; call again to accumulate, then ``optim_step``.

        Args:
            batch: from ``pack``, with the loss weights of the whole step.
            loss: called per micro-batch on the last pipeline stage.
            last: False where more batches of this step follow. Only ``train.overlap_grad_reduce`` needs to know: it
                sums gradients over ranks during the last backward pass.

        Returns:
            The loss's metrics over all ranks; reading the first of them waits for the device.

        Raises:
            MegarlError: the adapter is frozen; another adapter's gradient waits for its ``optim_step``; or the gradient
                was already reduced, by ``gradients()`` or, where that overlaps, by a call with ``last``: ``optim_step``
                must come first.
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
        set_training(self.chunks, True)
        self.optimizer.reducing = last and self.config.train.overlap_grad_reduce
        with contextlib.nullcontext() if last else without_reduction(self._wrapped):
            return self._stepper.forward_backward(batch, loss)

    def evaluate(self, batch: PackedBatch, loss: Loss) -> Metrics:
        """The loss's metrics over all ranks, as of ``forward_backward``, without a gradient and without dropout."""
        set_training(self.chunks, False)
        return self._stepper.evaluate(batch, loss)

    def optim_step(self, lr: float) -> dict[str, float]:
        """One AdamW update of the adapter; ``version`` goes up by one.

        Without a ``forward_backward`` before it the gradient is zero: AdamW moves on its moments and decays weights.

        Args:
            lr: learning rate of this update.

        Raises:
            GradientError: the gradient norm is not finite; nothing was updated.
            MegarlError: the gradient that waits is another adapter's.
        """
        self._check_pending()
        norm = self.optimizer.step(lr)
        self._pending = None
        self.version += 1
        return {"grad_norm": norm, "learning_rate": lr}

    def forward(self, batch: PackedBatch, *, adapter: bool | str = True) -> list[np.ndarray]:
        """Logprobs of the response tokens, without gradient and without dropout.

        Args:
            batch: from ``pack``.
            adapter: False gives the same model with the adapter disabled; a name, with that one of ``adapters`` in
                its place.

        Returns:
            One float32 array ``[R]`` per sample, in the batch's order.

        Raises:
            ConfigError: there is no such adapter.
        """
        set_training(self.chunks, False)
        if isinstance(adapter, str):
            computing: contextlib.AbstractContextManager = pick(self.adapters, adapter, "adapter").activated()
        else:
            computing = contextlib.nullcontext() if adapter else self.adapter.disabled()
        with computing:
            return self._stepper.logprobs(batch)

    def save_checkpoint(self, path: str | Path, extra: Mapping[str, Any] | None = None) -> None:
        """Start writing everything a bitwise resume needs, except the base; see ``checkpoint.save``.

        Returns once the state is copied to rank 0's host memory; a thread writes it. The checkpoint appears under its
        name when it is complete. What goes wrong until then is raised by the next call of this, of
        ``load_checkpoint`` or of ``finish_checkpoint``.
        """
        self._finish_param_gather()
        checkpoint.save(
            path,
            self.adapter,
            self.optimizer,
            self.groups,
            self._writer,
            identity=self._identity,
            version=self.version,
            extra=extra or {},
        )

    def finish_checkpoint(self) -> None:
        """Wait for the checkpoint that is being written, if any. Not a collective: only rank 0 writes.

        Raises:
            CheckpointError: it could not be written.
        """
        self._writer.wait()

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        """Restore a checkpoint made at any layout and return its ``extra``; see ``checkpoint.load``."""
        self.version, extra = checkpoint.load(
            path, self.adapter, self.optimizer, self.groups, self._writer, base=self.config.model.path
        )
        return extra

    def save_adapter(self, path: str | Path, experts: str = "as_trained") -> None:
        """Write the adapter as a PEFT directory.

        Args:
            path: replaced if it exists.
            experts: how it holds adapters of experts, see ``lora.save_experts``.

        Raises:
            AdapterError: the directory cannot be written.
        """
        self._finish_param_gather()
        self.adapter.save(path, experts)

    def load_adapter(self, path: str | Path) -> None:
        """Start from a PEFT adapter directory; the optimizer starts anew.

        Raises:
            AdapterError: it does not fit; nothing was changed.
        """
        self.adapter.read(path)
        if self.adapter.trainable:
            self.optimizer.start_anew()

    def export_weights(self, adapter_only: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Stream whole tensors on every rank; all ranks must consume the stream to its end.

        Args:
            adapter_only: True yields the adapter under PEFT's file names; False the base weights, without the
                adapter, under Hugging Face's.
        """
        self._finish_param_gather()
        return self.adapter.export() if adapter_only else stream_full(self._base_tensors(), self.groups)

    def export_merged(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Stream base weights plus adapter under Hugging Face's names, merged out of place in fp32, rounded once.

        Where the adapter changes one of tied embeddings, both are streamed: the merged model no longer ties them.
        """
        self._finish_param_gather()
        tensors = self._base_tensors(untied=self.adapter.unties)
        return stream_full(self.adapter.merged(tensors), self.groups)

    def gradients(self) -> dict[str, torch.Tensor]:
        """The whole accumulated gradient as tensors of PEFT's file: reduced, float32, on the CPU.

        ``optim_step`` may follow.
        """
        self.optimizer.reduce_gradients()
        tensors = self.adapter.tensors(self.optimizer.gradients())
        return {n: tensor.cpu().clone() for n, tensor in self.adapter.in_file(stream_full(tensors, self.groups))}
