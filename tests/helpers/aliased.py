# SPDX-License-Identifier: Apache-2.0
"""Run models on aliases of their trained parameters, as a CUDA graph does, without capturing anything."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megarl.model import megatron_model
from megarl.model.step.graphs import GraphedChunk
from megarl.model.step.micro_batch import MicroBatch


class _Aliased(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, graphed: GraphedChunk, run: tuple[torch.Tensor, Any]) -> torch.Tensor:
        ctx.graphed, ctx.run = graphed, run
        return run[0].detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        hidden, leaves = ctx.run
        ctx.graphed._add_gradients(torch.autograd.grad(hidden, leaves, gradients[0], allow_unused=True))
        return None, None, None


@contextmanager
def aliased() -> Iterator[None]:
    """Let models that are built meanwhile run so."""
    original, chunks = megatron_model.run_chunk, {}

    def run_chunk(chunk: Any, item: MicroBatch) -> torch.Tensor:
        graphed = chunks.setdefault(id(chunk), GraphedChunk(chunk))
        run = graphed._run(item.tokens_T[None], item.positions_T[None], item.packed)
        if not torch.is_grad_enabled():
            return run[0]
        return _Aliased.apply(torch.zeros((), requires_grad=True), graphed, run)

    megatron_model.run_chunk = run_chunk
    try:
        yield
    finally:
        megatron_model.run_chunk = original
