# SPDX-License-Identifier: Apache-2.0
"""Run one training step of megarl: ``MegatronModel`` with an adapter, as its users call it."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.bench.adapters import lora_section
from megarl.bench.random_weights import base_filler, model_folder
from megarl.bench.training.batch import loss_weights, make_samples
from megarl.bench.training.clock import Clock, MarkedLoss
from megarl.bench.training.settings import BenchSettings
from megarl.build import build_model
from megarl.config import LossConfig
from megarl.errors import MegarlError, first_few
from megarl.loss import build_loss
from megarl.model.megatron_model import MegatronModel

# Updates after which every matrix has had a gradient: a new adapter's B is 0, so that A has none in the first one.
UPDATES = 2


class MegarlStep:
    """A model with an adapter and its optimizer, ready to step.

    Attributes:
        device: the device of the model.
        info: facts for the report.
        chunks: the model's chunks.
    """

    def __init__(self, settings: BenchSettings, backend: str, numerics: str = "fast") -> None:
        self._model = _build(settings, backend, numerics)
        self.device = self._model.groups.device
        self._batch = self._model.pack(
            make_samples(settings, self._model.hf_config["vocab_size"]), loss_weights(settings)
        )
        self._loss = build_loss(LossConfig(importance_cap=None))
        self._clock: Clock | None = None
        self._marks = marks_passes(settings)
        self._checked = False
        self.chunks = self._model.chunks
        if self._marks and not settings.cuda_graphs:  # a graph replays kernels without calling modules
            self._model.chunks[-1].register_forward_pre_hook(self._mark_start)
            self._model.chunks[-1].register_forward_hook(self._mark_forward)
        trained = sum(parameter.numel() for _, parameter in self._model.adapter.parameters())
        self.info: dict[str, Any] = {"backend": backend, "trained_parameters": trained, "optimizer": True}

    def step(self, clock: Clock) -> None:
        """Run forward, logprobs, backward and the optimizer."""
        self._clock = clock
        loss = MarkedLoss(self._loss, clock) if self._marks else self._loss
        metrics = self._model.forward_backward(self._batch, loss)
        clock.mark("backward" if self._marks else "passes")
        updated = self._model.optim_step(self._model.config.train.learning_rate)
        clock.mark("optimizer")
        self.info |= {name: updated[name] for name in ("grad_tensors", "adapter_tensors")}
        self._check_gradients()
        self.info["entropy"] = metrics["entropy"]  # waits for the device
        self.info |= {name: value for name, value in self._model.measured().items() if name == "compilations"}

    def logprobs(self) -> None:
        """Run a pass without gradient, as for the old policy's logprobs, and store the mean logprob."""
        self._clock = None
        self.info["logprob"] = float(np.concatenate(self._model.forward(self._batch)).mean())

    def _check_gradients(self) -> None:
        """Refuse to measure a step that trains a part of its adapter only, once, while the contender warms up."""
        updates, never = self._model.optimizer.coverage.never() if not self._checked else (0, [])
        if updates < UPDATES:
            return
        self._checked = True
        if never:
            raise MegarlError(f"{len(never)} matrices of the adapter get no gradient:\n{first_few(never)}")

    def _mark_start(self, module: torch.nn.Module, inputs: Any) -> None:
        if self._clock is not None:
            self._clock.mark_next_forward()

    def _mark_forward(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if self._clock is not None:
            self._clock.mark("forward")


def _build(settings: BenchSettings, backend: str, numerics: str) -> MegatronModel:
    """Build the model; the base weights of a named shape are random."""
    sections: dict[str, Any] = {
        "lora": lora_section(settings.r, settings.dropout),
        "parallel": settings.layout,
        "train": settings.train,
    }
    with tempfile.TemporaryDirectory() as scratch:
        path = str(model_folder(settings.model, Path(scratch), settings.layers))
        section = {"path": path, "dtype": settings.dtype, "backend": backend, "numerics": numerics}
        built = build_model(section, **sections, fill_base=base_filler(settings.model, settings.seed))
        assert isinstance(built, MegatronModel)
        return built


def marks_passes(settings: BenchSettings) -> bool:
    """Return True if forward and backward passes can be timed apart.

    Those of several micro-batches overlap in a pipeline, and CUDA graphs do not say where one begins.
    """
    return settings.pipeline == 1 and not (settings.cuda_graphs and settings.rounds > 1)
