# SPDX-License-Identifier: Apache-2.0
"""Run one training step of all weights: what LoRA is compared with.

megarl trains adapters only, so this is put together from the parts of ``MegatronModel``.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megarl.bench.random_weights import base_filler
from megarl.bench.settings import model_config
from megarl.bench.training.batch import loss_weights, make_samples
from megarl.bench.training.clock import Clock, MarkedLoss
from megarl.bench.training.megarl_step import marks_passes
from megarl.bench.training.settings import BenchSettings
from megarl.config import LossConfig, ModelConfig
from megarl.loss import build_loss
from megarl.model.layers.backends import BlockSpec
from megarl.model.layers.build import build_chunks
from megarl.model.optimizer.adapter_optimizer import AdapterOptimizer
from megarl.model.optimizer.ddp import wrap_ddp
from megarl.model.step.compiled import compile_layers
from megarl.model.step.graphs import graphed
from megarl.model.step.micro_batch import MicroBatch
from megarl.model.step.packing import pack
from megarl.model.step.schedule import PipelineStepper, run_chunk, set_training
from megarl.parallel.device import pick_device
from megarl.parallel.groups import init_groups

# Bytes per trained parameter: bf16 weight, fp32 gradient, main weight and two moments.
TRAINED_BYTES = 18


class FullStep:
    """A model whose weights are all trained, ready to step. Has the interface of ``MegarlStep``."""

    def __init__(self, settings: BenchSettings, backend: str) -> None:
        self.device = pick_device(settings.device)
        layout, train = settings.layout, settings.train
        groups = init_groups(layout, self.device, seed=settings.seed)
        hf_config = model_config(settings.model, settings.layers)
        choice = ModelConfig(path=settings.model, dtype=settings.dtype, backend=backend)  # type: ignore[arg-type]
        self._chunks = build_chunks(hf_config, choice, layout, groups, train, _layers_of(backend, settings))
        base_filler(settings.model, settings.seed)(self._chunks, Path(settings.model), hf_config, groups)
        for chunk in self._chunks:
            chunk.requires_grad_(True)
        parameters = [
            (f"{stage}.{name}", parameter)
            for stage, chunk in enumerate(self._chunks)
            for name, parameter in chunk.named_parameters()
        ]
        for name, parameter in parameters:
            if ".experts." in name:
                # Tells mcore to add an expert's gradient over the ranks that hold it, also without expert parallelism.
                parameter.allreduce = False
        trained = sum(parameter.numel() for _, parameter in parameters)
        if settings.compile:
            compile_layers(self._chunks, self.device)
        self._wrapped = wrap_ddp(self._chunks, train)
        # If the optimizer's state cannot fit on some rank, the step ends with each rank's gradients.
        counts = [trained] * groups.topology.world_size
        dist.all_gather_object(counts, trained)
        steps = _fits(max(counts), self.device)
        self._optimizer = AdapterOptimizer(self._wrapped, parameters, train) if steps else None
        self._run = graphed(self._wrapped, self.device) if settings.cuda_graphs else run_chunk
        self._stepper = PipelineStepper(
            self._wrapped,
            groups,
            vocab_size=hf_config["vocab_size"],
            temperature=1.0,
            keep_logits_gib=train.keep_logits_gib,
        )
        samples = make_samples(settings, hf_config["vocab_size"])
        self._batch = pack(
            samples,
            loss_weights(settings),
            max_tokens=train.micro_batch_tokens,
            data=layout.data,
            pipeline=layout.pipeline,
            virtual_pipeline=layout.virtual_pipeline,
            context=layout.context,
            multiple=layout.tensor,
        )
        self._marks = marks_passes(settings)
        self._lr = train.learning_rate
        self._loss = build_loss(LossConfig(importance_cap=None))
        self.info: dict[str, Any] = {"backend": backend, "trained_parameters": trained, "optimizer": steps}
        self._zero()

    def step(self, clock: Clock) -> None:
        """Run forward, logprobs and backward, and the optimizer if there is one."""
        set_training(self._chunks, True)

        def run(chunk: Any, item: MicroBatch) -> torch.Tensor:
            clock.mark_next_forward()
            hidden = self._run(chunk, item)
            clock.mark("forward")
            return hidden

        self._stepper.run = run if self._marks else self._run
        loss = MarkedLoss(self._loss, clock) if self._marks else self._loss
        metrics = self._stepper.forward_backward(self._batch, loss)
        clock.mark("backward" if self._marks else "passes")
        if self._optimizer is None:
            self._zero()
        else:
            self._optimizer.step(self._lr)
            clock.mark("optimizer")
        self.info["entropy"] = metrics["entropy"]  # waits for the device

    def logprobs(self) -> None:
        """Run a pass without gradient, and store the mean logprob."""
        set_training(self._chunks, False)
        self._stepper.run = self._run
        self.info["logprob"] = float(np.concatenate(self._stepper.logprobs(self._batch)).mean())

    def _zero(self) -> None:
        if self._optimizer is not None:
            self._optimizer.zero_grad()
            return
        for chunk in self._wrapped:
            chunk.zero_grad_buffer()


def _layers_of(backend: str, settings: BenchSettings) -> BlockSpec | None:
    """Return mcore's own choice of layers for a back end; None for megarl's, which can be compiled."""
    if backend != "te" or settings.compile:
        return None
    from megarl.model.layers.te import whole_te_block_spec

    return whole_te_block_spec


def _fits(trained: int, device: torch.device) -> bool:
    """Return True if weights, gradients and optimizer state leave half of the GPU for activations."""
    if device.type == "cpu":
        return True
    return trained * TRAINED_BYTES < torch.cuda.get_device_properties(device).total_memory / 2
