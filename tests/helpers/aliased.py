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


class _Aliased(torch.autograd.Function):
    """A forward pass; when the output's gradient is there, both passes. A graph has kept the first instead."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, model: AliasedModel, feed: dict[str, Any]) -> torch.Tensor:
        ctx.again = model, feed
        return model.passes(feed)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        model, feed = ctx.again
        with torch.enable_grad():
            model.passes(feed, gradients[0])
        return None, None, None


@contextmanager
def aliased() -> Iterator[None]:
    """Let models that are built meanwhile run so."""
    original, models = megatron_model.run_chunk, {}

    def run_chunk(chunk: Any, item: MicroBatch) -> torch.Tensor:
        model = models.setdefault(id(chunk), AliasedModel(inner_model(chunk)))
        feed = {
            "input_ids": item.tokens_T[None],
            "position_ids": item.positions_T[None],
            "packed_seq_params": item.packed,
        }
        if not torch.is_grad_enabled():
            return model.passes(feed)
        return _Aliased.apply(torch.zeros((), requires_grad=True), model, feed)

    megatron_model.run_chunk = run_chunk
    try:
        yield
    finally:
        megatron_model.run_chunk = original
