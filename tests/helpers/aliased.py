# SPDX-License-Identifier: Apache-2.0
"""Run models on aliases of their trained parameters, as a CUDA graph does, without capturing anything."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megarl.model import megatron_model
from megarl.model.layers.gpt import inner_model
from megarl.model.step.aliased import AliasedModel
from megarl.model.step.micro_batch import MicroBatch
from megarl.model.step.schedule import feed


class _Aliased(torch.autograd.Function):
    """A forward pass; when the output's gradient is there, both passes. A graph has kept the first instead."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, model: AliasedModel, given: dict[str, Any]) -> torch.Tensor:
        ctx.again = model, given
        return model.passes(given)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        model, given = ctx.again
        with torch.enable_grad():
            model.passes(given, gradients[0])
        return None, None, None


@contextmanager
def aliased() -> Iterator[None]:
    """Let models that are built meanwhile run so."""
    original, models = megatron_model.run_chunk, {}

    def run_chunk(chunk: Any, item: MicroBatch) -> torch.Tensor:
        model = models.setdefault(id(chunk), AliasedModel(inner_model(chunk)))
        given = feed(item.tokens_T, item.positions_T, item.packed)
        if not torch.is_grad_enabled():
            return model.passes(given)
        return _Aliased.apply(torch.zeros((), requires_grad=True), model, given)

    megatron_model.run_chunk = run_chunk
    try:
        yield
    finally:
        megatron_model.run_chunk = original
