# SPDX-License-Identifier: Apache-2.0
"""Run one training step of megarl: LoRA on either back end, or all weights."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig as PeftConfig

from megarl.bench.batch import make_samples
from megarl.bench.clock import Clock
from megarl.bench.settings import BenchSettings, model_config
from megarl.bench.shapes import SHAPES
from megarl.config import LossConfig, ModelConfig, ParallelConfig, TrainConfig
from megarl.lora import apply_lora
from megarl.loss import build_loss
from megarl.loss.base import LossOutput, TokenBatch
from megarl.model.layers.build import build_chunks
from megarl.model.layers.gpt import PackedGPTModel
from megarl.model.optimizer.adapter_optimizer import AdapterOptimizer
from megarl.model.optimizer.ddp import wrap_ddp
from megarl.model.step.graphs import graphed
from megarl.model.step.packing import MicroBatch, pack
from megarl.model.step.schedule import Stepper, run_chunk, set_training
from megarl.model.weights.base_tensors import load_base
from megarl.parallel.device import pick_device
from megarl.parallel.groups import Groups, init_groups
from megarl.parallel.rendezvous import ALONE

# Bytes per trained parameter: bf16 weight, fp32 gradient, main weight and two moments.
TRAINED_BYTES = 18


class MegarlStep:
    """A model and its optimizer, ready to step.

    Attributes:
        device: the device of the model.
        info: facts for the report.
    """

    def __init__(self, settings: BenchSettings, backend: str, *, full: bool) -> None:
        self.device = pick_device(settings.device)
        os.environ.update(ALONE)
        groups = init_groups(ParallelConfig(), self.device, seed=settings.seed)
        hf_config = model_config(settings.model)
        choice = ModelConfig(path=settings.model, dtype=settings.dtype, backend=backend)  # type: ignore[arg-type]
        train = TrainConfig(seed=settings.seed)
        self._chunks = build_chunks(hf_config, choice, ParallelConfig(), groups, train)
        _fill(self._chunks, settings, hf_config, groups)
        parameters = _train_all(self._chunks) if full else _adapters(self._chunks, settings, hf_config, groups)
        trained = sum(parameter.numel() for _, parameter in parameters)
        self._wrapped = wrap_ddp(self._chunks, train)
        # If the optimizer's state cannot fit, the step of the full model ends with the gradients.
        steps = not full or _fits(trained, self.device)
        self._optimizer = AdapterOptimizer(self._wrapped, parameters, train) if steps else None
        self._run = graphed(self._wrapped, self.device) if settings.cuda_graphs else run_chunk
        self._stepper = Stepper(
            self._wrapped,
            groups,
            vocab_size=hf_config["vocab_size"],
            temperature=1.0,
            keep_logits_gib=train.keep_logits_gib,
        )
        samples = make_samples(settings, hf_config["vocab_size"])
        weights = np.full(len(samples), 1.0 / settings.response_tokens)
        self._batch = pack(samples, weights, max_tokens=settings.tokens)
        self._lr = train.learning_rate
        self._loss = build_loss(LossConfig(importance_cap=None))
        self.info: dict[str, Any] = {"backend": backend, "trained_parameters": trained, "optimizer": steps}
        self._zero()

    def step(self, clock: Clock) -> None:
        """Run forward, logprobs and backward, and the optimizer if there is one."""
        set_training(self._chunks, True)

        def run(chunk: Any, item: MicroBatch) -> torch.Tensor:
            hidden = self._run(chunk, item)
            clock.mark("forward")
            return hidden

        self._stepper.run = run
        metrics = self._stepper.forward_backward(self._batch, _Marked(self._loss, clock))
        clock.mark("backward")
        if self._optimizer is None:
            self._zero()
        else:
            self._optimizer.step(self._lr)
            clock.mark("optimizer")
        self.info["entropy"] = metrics["entropy"]  # waits for the device

    def logprobs(self) -> None:
        """Run a pass without gradient, as for the old policy's logprobs, and store the mean logprob."""
        set_training(self._chunks, False)
        self._stepper.run = self._run
        self.info["logprob"] = float(np.concatenate(self._stepper.logprobs(self._batch)).mean())

    def _zero(self) -> None:
        if self._optimizer is not None:
            self._optimizer.zero_grad()
            return
        for chunk in self._wrapped:
            chunk.zero_grad_buffer()


class _Marked:
    """A loss that marks the time when it receives the logprobs."""

    def __init__(self, loss: Callable[[torch.Tensor, TokenBatch], LossOutput], clock: Clock) -> None:
        self._loss, self._clock = loss, clock

    def __call__(self, logprobs_T: torch.Tensor, tokens: TokenBatch) -> LossOutput:
        """Return the loss's own result."""
        self._clock.mark("logprobs")
        return self._loss(logprobs_T, tokens)


def _fill(chunks: list[PackedGPTModel], settings: BenchSettings, hf_config: dict[str, Any], groups: Groups) -> None:
    """Fill the base weights: from the folder, or with random numbers drawn on the device."""
    if settings.model not in SHAPES:
        load_base(chunks, Path(settings.model).expanduser(), hf_config, groups)
        return
    torch.manual_seed(settings.seed)
    with torch.no_grad():
        for name, parameter in chunks[0].named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.02)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def _adapters(
    chunks: list[PackedGPTModel], settings: BenchSettings, hf_config: dict[str, Any], groups: Groups
) -> list[tuple[str, torch.nn.Parameter]]:
    config = PeftConfig(r=settings.r, lora_alpha=2 * settings.r, target_modules="all-linear", task_type="CAUSAL_LM")
    return apply_lora(chunks, config, hf_config, seed=settings.seed, groups=groups).parameters()


def _train_all(chunks: list[PackedGPTModel]) -> list[tuple[str, torch.nn.Parameter]]:
    for chunk in chunks:
        chunk.requires_grad_(True)
    return list(chunks[0].named_parameters())


def _fits(trained: int, device: torch.device) -> bool:
    """Return True if weights, gradients and optimizer state leave half of the GPU for activations."""
    if device.type == "cpu":
        return True
    return trained * TRAINED_BYTES < torch.cuda.get_device_properties(device).total_memory / 2
