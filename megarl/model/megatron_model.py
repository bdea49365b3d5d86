# SPDX-License-Identifier: Apache-2.0
"""Build a model on Megatron-Core on this rank. It works alike under torchrun and inside Ray actors."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from megarl.config import TrainerConfig, checks
from megarl.model.adapter import Attach
from megarl.model.checkpoint.identity import identify
from megarl.model.layers.attention.rope import rope_of
from megarl.model.layers.build import build_chunks
from megarl.model.layers.sequence_work import sequence_work
from megarl.model.optimizer.adapter_optimizer import make_optimizers
from megarl.model.optimizer.ddp import without_reduction, wrap_ddp
from megarl.model.step.compiled import CompilationCount, compile_layers
from megarl.model.step.graphs import ALIGNED, graphed, token_unit
from megarl.model.step.schedule import PipelineStepper, run_chunk, set_training
from megarl.model.trained_model import TrainedModel
from megarl.model.weights.base_tensors import base_tensors, load_base
from megarl.model.weights.full_config import names_of
from megarl.model.weights.hf_folder import read_config
from megarl.model.weights.sharded_tensor import ShardedTensor
from megarl.parallel.groups import Groups


class MegatronModel(TrainedModel):
    """A model of Megatron-Core with one or several adapters, at any layout; see ``TrainedModel`` for its methods.

    Attributes:
        adapters: the adapters that ``attach`` returned, by name.
        hf_config: the model's ``config.json``, completed.
        chunks: this rank's chunks of the model.
    """

    def __init__(
        self, config: TrainerConfig, groups: Groups, attach: Attach, fill_base: Callable[..., None] = load_base
    ) -> None:
        """Build the model, load this rank's slices of the base weights, attach the adapters, make their optimizers.

        Args:
            config: the trainer's settings; ``RunConfig.trainer`` has those of a run.
            groups: process groups, from ``init_groups``.
            attach: function that puts the adapters on (from ``megarl.lora``).
            fill_base: function that fills the base weights, with the arguments of ``load_base``. Another one than that
                needs only a ``config.json`` in ``model.path``; such a model has no checkpoints, since they name
                the base weights.

        Raises:
            ConfigError: ``model.family`` cannot be loaded, or it is not for this model.
            ModelError: the folder is incomplete or does not match its config.
            UnsupportedError: the family or a setting is not supported; or several adapters are trained together with
                ``train.distributed_optimizer`` or ``train.overlap_grad_reduce``.
        """
        checks.add_own_family(config.model)
        self.hf_config = read_config(config.model.path)
        checks.check_graphs(config, self.hf_config)
        self._rope = rope_of(self.hf_config)
        if config.longest is not None:
            self._rope.check_length(config.longest, "sampler.max_prompt_tokens + sampler.max_response_tokens")
        train = config.train
        self.chunks = build_chunks(self.hf_config, config.model, config.parallel, groups, train)
        fill_base(self.chunks, config.model.path, self.hf_config, groups)
        attached = attach(self.chunks, self.hf_config, groups)
        adapters = list(attached) if isinstance(attached, Sequence) else [attached]
        if train.compile:
            compile_layers(self.chunks, groups.device)
        self._compilations = CompilationCount() if train.compile else None
        self._wrapped = wrap_ddp(self.chunks, train)
        trained = {adapter.name: adapter.parameters() for adapter in adapters if adapter.trainable}
        stepper = PipelineStepper(
            self._wrapped,
            groups,
            vocab_size=self.hf_config["vocab_size"],
            temperature=config.temperature,
            run=graphed(self._wrapped, groups.device) if train.cuda_graphs else run_chunk,
            keep_logits_gib=train.keep_logits_gib,
        )
        # Identified now, because the folder may be gone when the first checkpoint is saved. Only rank 0 stores it.
        has_checkpoints = fill_base is load_base
        identity = identify(config.model.path) if has_checkpoints and groups.rank == 0 else {}
        super().__init__(
            config,
            groups,
            adapters,
            make_optimizers(self._wrapped, trained, train),
            stepper,
            work=sequence_work(self.hf_config),
            identity=identity if has_checkpoints else None,
            multiple=_multiple(config),
        )

    def _check_length(self, length: int, subject: str) -> None:
        self._rope.check_length(length, subject)

    def measured(self) -> dict[str, float]:
        """Return ``TrainedModel.measured``; with ``train.compile`` also ``compilations``, the graphs compiled since."""
        counted = {} if self._compilations is None else {"compilations": float(self._compilations.read())}
        return super().measured() | counted

    def _set_training(self, training: bool) -> None:
        set_training(self.chunks, training)

    def _accumulating(self, last: bool) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if last else without_reduction(self._wrapped)

    def _base_tensors(self, *, untied: bool = False) -> list[ShardedTensor]:
        names = names_of(self.hf_config)
        return [tensor for chunk in self.chunks for tensor in base_tensors(chunk, names, self.groups, untied=untied)]

    def _base_parameters(self) -> Iterator[torch.nn.Parameter]:
        return (parameter for chunk in self.chunks for parameter in chunk.parameters())


def _multiple(config: TrainerConfig) -> int:
    """Return the multiple that micro-batches are padded to, in tokens of a rank."""
    tensor = config.parallel.tensor
    if config.train.cuda_graphs:
        return token_unit(config.train.micro_batch_tokens, tensor)
    return tensor * ALIGNED if config.train.compile else tensor
